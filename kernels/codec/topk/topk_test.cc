#include "kernels/codec/topk/topk.h"

#include <cmath>
#include <numeric>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/codec/lossy_reference.h"
#include "kernels/codec/topk/topk_test_util.h"

namespace thalweg::topk_test {
namespace {

using ::testing::HasSubstr;

// Selects by sorting all of x.
TopKResult Reference(const Floats& x, const Floats& residual, uint64_t count) {
  const auto magnitude = [&](uint64_t i) {
    return std::isfinite(x[i]) ? std::fabs(x[i]) : kInfinity;
  };
  std::vector<uint64_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint64_t a, uint64_t b) { return magnitude(a) > magnitude(b); });
  TopKResult result;
  result.nonfinite = CountNonFinite(x);
  order.resize(std::min<uint64_t>(x.size(), std::max(count, result.nonfinite)));
  std::sort(order.begin(), order.end());
  if (!residual.empty()) {
    result.residual = x;
    for (size_t i = 0; i < x.size(); ++i) {
      if (!std::isfinite(x[i])) result.residual[i] = residual[i];
    }
  }
  std::vector<ReferenceEntry> entries;
  for (uint64_t i : order) {
    if (x[i] == 0) continue;
    entries.push_back({i, std::isnan(x[i]) ? kNaN : x[i]});
    if (!residual.empty() && std::isfinite(x[i])) result.residual[i] = 0;
  }
  result.bytes = ReferenceTopK(entries);
  return result;
}

// The expected bytes are the worked example of docs/codecs.md.
TEST(TopKTest, EntriesAreTheDocumentedBytes) {
  Floats values(300);
  values[0] = 1;
  values[5] = -2;
  values[200] = 3;
  EXPECT_EQ(EncodeTopKOnCpu(values, {}, 2).bytes,
            BytesOf({0x02, 0x00, 0x00, 0x00, 0x05, 0x00, 0x00, 0x00, 0xc0, 0xc2, 0x01, 0x00, 0x00,
                     0x40, 0x40}));
}

TEST(TopKTest, ZerosNeverCross) {
  EXPECT_EQ(EncodeTopKOnCpu(Floats(10), {}, 5).bytes, BytesOf({0, 0, 0, 0}));
  EXPECT_EQ(EncodeTopKOnCpu({}, {}, 1).bytes, BytesOf({0, 0, 0, 0}));
  EXPECT_EQ(EncodeTopKOnCpu({0, -0.0f, 0x1p-149f}, {}, 3).bytes, ReferenceTopK({{2, 0x1p-149f}}));
}

TEST(TopKTest, OfEqualMagnitudesTheLowerIndexGoesFirst) {
  EXPECT_EQ(EncodeTopKOnCpu({1, -1, 1, -1}, {}, 2).bytes, ReferenceTopK({{0, 1}, {1, -1}}));
  EXPECT_EQ(EncodeTopKOnCpu({1, -1, 2, -1}, {}, 2).bytes, ReferenceTopK({{0, 1}, {2, 2}}));
}

TEST(TopKTest, ResidualIsAddedAndLeftBehind) {
  const TopKResult result = EncodeTopKOnCpu({1, 2, -3, 4}, {10, 0.5f, 1, -1}, 2);
  EXPECT_EQ(result.bytes, ReferenceTopK({{0, 11}, {3, 3}}));
  EXPECT_EQ(result.residual, Floats({0, 2.5f, -2, 0}));
}

TEST(TopKTest, AllNonFiniteElementsCrossAndKeepTheirResidual) {
  const Floats values = {kNaN, 1, kInfinity, -kInfinity, 5};
  const TopKResult result = EncodeTopKOnCpu(values, {1, 2, 3, 4, 5}, 1);
  EXPECT_EQ(result.bytes, ReferenceTopK({{0, kNaN}, {2, kInfinity}, {3, -kInfinity}}));
  EXPECT_EQ(result.residual, Floats({1, 3, 3, 4, 10}));
  EXPECT_EQ(result.nonfinite, 3u);
  EXPECT_EQ(EncodeTopKOnCpu(values, {}, 4).bytes,
            ReferenceTopK({{0, kNaN}, {2, kInfinity}, {3, -kInfinity}, {4, 5}}));
}

TEST(TopKTest, CountIsTheRatioRoundedUp) {
  EXPECT_EQ(TopKCount(0.01, 0), 1u);
  EXPECT_EQ(TopKCount(0.01, 1), 1u);
  EXPECT_EQ(TopKCount(0.01, 100), 1u);
  EXPECT_EQ(TopKCount(0.01, 101), 2u);
  EXPECT_EQ(TopKCount(0.25, 1000), 250u);
  EXPECT_EQ(TopKCount(1, 1000), 1000u);
}

TEST(TopKTest, ChoosesAsSortingWould) {
  std::mt19937_64 random(16);
  for (size_t elems : kLossySizes) {
    for (unsigned special_every : {0u, 10u, 1000u}) {
      const Floats values = RandomFloats(elems, special_every, random);
      const Floats before = RandomFloats(elems, special_every * 2, random);
      for (double ratio : {0.001, 0.01, 0.3, 1.0}) {
        SCOPED_TRACE(testing::Message()
                     << elems << " elements, special " << special_every << ", ratio " << ratio);
        const uint64_t count = TopKCount(ratio, elems);
        for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
          const ForcedTarget forced(target);
          ExpectSame(EncodeTopKOnCpu(values, {}, count), Reference(values, {}, count));
          ExpectSame(EncodeTopKOnCpu(values, before, count),
                     Reference(Sum(values, before), before, count));
        }
      }
    }
  }
}

TEST(TopKTest, ChoosesAsSortingWouldAmongManyEqualMagnitudes) {
  std::mt19937_64 random(17);
  for (int repeat = 0; repeat < 50; ++repeat) {
    Floats values(1 + random() % 2000);
    for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 7) - 3);
    const uint64_t count = 1 + random() % values.size();
    ExpectSame(EncodeTopKOnCpu(values, {}, count), Reference(values, {}, count));
  }
}

TEST(TopKTest, EveryElementMayCross) {
  const Floats values(1000, -1);
  const TopKResult result = EncodeTopKOnCpu(values, {}, 1000);
  EXPECT_EQ(result.bytes.size(), MaxEncodedBytes(WireFormat::kTopK, 1000));
  EXPECT_TRUE(CheckTopK(result.bytes, 1000).ok());
}

TEST(TopKTest, PayloadsThatAreNotOneChunkAreRefused) {
  const auto value = [](Bytes bytes) {
    bytes.resize(bytes.size() + 4);
    return bytes;
  };
  const struct {
    Bytes bytes;
    uint64_t elems;
    const char* expected;
  } cases[] = {
      {{}, 9, "a count of 4 bytes, got 0"},
      {BytesOf({1, 0, 0}), 9, "a count of 4 bytes, got 3"},
      {BytesOf({1, 0, 0, 0}), 9, "entry 0 of 1: the payload ends before it"},
      {BytesOf({1, 0, 0, 0, 0x80}), 999, "the payload ends before it"},
      {BytesOf({1, 0, 0, 0, 2, 0, 0, 0}), 9, "the payload ends in its value"},
      {value(BytesOf({0, 0, 0, 0})), 9, "expected 4 bytes for 0 entries, got 8"},
      {value(BytesOf({2, 0, 0, 0, 2})), 9, "entry 1 of 2: the payload ends before it"},
      {value(BytesOf({1, 0, 0, 0, 9})), 9, "its index is too large in a chunk of 9 elements"},
      {value(BytesOf({1, 0, 0, 0, 0})), 0, "its index is too large"},
      {value(BytesOf({1, 0, 0, 0, 0x80, 0})), 999, "not in the shortest form"},
      {value(BytesOf({1, 0, 0, 0, 0x80, 0x80, 0x80, 0x80, 0x80, 1})), 0xffffffff,
       "more than five bytes"},
      {value(BytesOf({1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x7f})), 0xffffffff, "too large"},
      {BytesOf({0xff, 0xff, 0xff, 0xff}), 9, "entry 0 of 4294967295: the payload ends before it"},
  };
  for (const auto& c : cases) {
    const absl::Status status = CheckTopK(c.bytes, c.elems);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.expected));
  }
  // The indices rise, but their sum would be beyond the chunk.
  const Bytes two = ReferenceTopK({{8, 1}, {17, 1}});
  EXPECT_TRUE(CheckTopK(two, 18).ok());
  EXPECT_FALSE(CheckTopK(two, 17).ok());
}

TEST(TopKTest, TheFoldIsTheMeanOverAllWorkersAtEveryIndexThatOccurs) {
  const Bytes a = ReferenceTopK({{0, 1}, {5, -2}, {1024, 8}});
  const Bytes b = ReferenceTopK({{5, 6}, {3000, kInfinity}});
  const Bytes c = ReferenceTopK({{1024, -8}, {3000, -kInfinity}, {4999, 16}});
  const std::vector<std::span<const std::byte>> payloads = {a, b, c};
  Bytes out(a.size() + b.size() + c.size());
  const Encoded folded = FoldTopK(payloads, {{1, 1, 2}, 4}, 5000, out.data());
  out.resize(folded.bytes);
  EXPECT_EQ(out, ReferenceTopK({{0, 0.25f}, {5, 1}, {1024, -2}, {3000, kNaN}, {4999, 8}}));
  EXPECT_EQ(folded.nonfinite_elems, 1u);
}

}  // namespace
}  // namespace thalweg::topk_test
