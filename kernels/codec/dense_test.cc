#include "kernels/codec/dense.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/codec_spec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast/cast.h"
#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"
#include "kernels/codec/payload_test_util.h"
#include "kernels/reduce/fold_elements.h"
#include "kernels/reduce/reduce.h"

namespace thalweg::dense_test {
namespace {

using ::testing::HasSubstr;

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};

Bytes RandomBytes(DType type, size_t elems, unsigned special_every, std::mt19937_64& random) {
  switch (type) {
    case DType::kFloat32:
      return RandomElements<Fp32>(elems, special_every, random);
    case DType::kFloat16:
      return RandomElements<Fp16>(elems, special_every, random);
    case DType::kBFloat16:
      return RandomElements<BFloat16>(elems, special_every, random);
    case DType::kFloat64:
      return RandomElements<Fp64>(elems, special_every, random);
  }
  return {};
}

template <class T>
Payload PayloadOf(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return Split(bytes, {});
}

struct Folded {
  absl::Status status;
  Bytes out;
  uint64_t nonfinite = 0;
};

Folded Fold(const std::vector<Payload>& contributions, const std::vector<uint32_t>& workers,
            DType wire, size_t elems) {
  Folded folded;
  folded.out.resize(elems * SizeOf(wire));
  folded.status =
      FoldPayloads(contributions, workers, wire, elems, folded.out.data(), &folded.nonfinite);
  return folded;
}

// Returns the plain mean of contributions that lie in one piece each.
Folded FoldWhole(const std::vector<Bytes>& contributions, DType wire, size_t elems) {
  std::vector<const void*> pointers;
  for (const Bytes& bytes : contributions) pointers.push_back(bytes.data());
  const std::vector<float> weights(contributions.size(), 1.0f);
  Folded folded;
  folded.out.resize(elems * SizeOf(wire));
  folded.nonfinite = FoldMean(pointers, weights, static_cast<float>(contributions.size()), wire,
                              wire, folded.out.data(), elems);
  return folded;
}

class CodecTest : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, CodecTest, ::testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(CodecTest, FoldDoesNotDependOnWhereContributionsAreCut) {
  const DType wire = GetParam();
  const size_t elems = 5;
  const size_t bytes = elems * SizeOf(wire);
  std::mt19937_64 random(5);
  for (size_t count = 1; count <= 4; ++count) {
    std::vector<Bytes> whole;
    for (size_t k = 0; k < count; ++k) whole.push_back(RandomBytes(wire, elems, 6, random));
    const Folded expected = FoldWhole(whole, wire, elems);
    for (size_t first = 0; first <= bytes; ++first) {
      for (size_t second = 0; first + second <= bytes; ++second) {
        std::vector<Payload> contributions;
        for (size_t k = 0; k < count; ++k) {
          contributions.push_back(Split(whole[k], {(first + 3 * k) % (bytes + 1), second + k}));
        }
        const Folded got = Fold(contributions, std::vector<uint32_t>(count, 1), wire, elems);
        ASSERT_TRUE(got.status.ok()) << got.status;
        ASSERT_EQ(got.out, expected.out) << count << " cut at " << first << ", " << second;
        ASSERT_EQ(got.nonfinite, expected.nonfinite) << count << " at " << first << ", " << second;
      }
    }
  }
}

TEST_P(CodecTest, FoldOfRandomPiecesEqualsFoldOfTheWhole) {
  const DType wire = GetParam();
  std::mt19937_64 random(6);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const size_t elems = random() % 400;
    const size_t count = 1 + random() % 5;
    std::vector<Bytes> whole;
    std::vector<Payload> contributions;
    for (size_t k = 0; k < count; ++k) {
      whole.push_back(RandomBytes(wire, elems, 30, random));
      contributions.push_back(Split(whole[k], RandomLengths(whole[k].size(), 60, random)));
    }
    const Folded expected = FoldWhole(whole, wire, elems);
    const Folded got = Fold(contributions, std::vector<uint32_t>(count, 1), wire, elems);
    ASSERT_TRUE(got.status.ok()) << got.status;
    ASSERT_EQ(got.out, expected.out) << repeat;
    ASSERT_EQ(got.nonfinite, expected.nonfinite) << repeat;
  }
}

TEST_P(CodecTest, OnlyTheRatioOfWorkerCountsMatters) {
  const DType wire = GetParam();
  std::mt19937_64 random(7);
  std::vector<Payload> contributions;
  for (int k = 0; k < 2; ++k) {
    contributions.push_back(Split(RandomBytes(wire, 50, 0, random), {}));
  }
  EXPECT_EQ(Fold(contributions, {2, 2}, wire, 50).out, Fold(contributions, {1, 1}, wire, 50).out);
  EXPECT_EQ(Fold(contributions, {3, 9}, wire, 50).out, Fold(contributions, {1, 3}, wire, 50).out);
  EXPECT_NE(Fold(contributions, {1, 3}, wire, 50).out, Fold(contributions, {1, 1}, wire, 50).out);
}

TEST_P(CodecTest, DecodeOfAnyPiecesEqualsTheCastOfTheWhole) {
  const DType wire = GetParam();
  std::mt19937_64 random(8);
  for (DType bucket : {DType::kFloat32, wire}) {
    if (wire == DType::kFloat64 && bucket == DType::kFloat32) continue;
    for (int repeat = 0; repeat < 100; ++repeat) {
      const size_t elems = random() % 200;
      const Bytes whole = RandomBytes(wire, elems, 10, random);
      Bytes expected(elems * SizeOf(bucket));
      Cast(wire, whole.data(), bucket, expected.data(), elems);
      Bytes got(expected.size());
      const Payload payload = Split(whole, RandomLengths(whole.size(), 60, random));
      const absl::Status status = DecodePayload(payload, wire, bucket, elems, got.data());
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_EQ(got, expected) << Name(bucket) << ", " << repeat;
    }
  }
}

TEST_P(CodecTest, PayloadsOfAnotherSizeAreRefused) {
  const DType wire = GetParam();
  const size_t right = 4 * SizeOf(wire);
  Bytes out(right);
  uint64_t nonfinite = 0;
  for (size_t size : {size_t{0}, right - 1, right + 1, 2 * right}) {
    const std::vector<Payload> contributions = {Split(Bytes(right), {}), Split(Bytes(size), {})};
    const std::vector<uint32_t> workers = {1, 1};
    const absl::Status folded =
        FoldPayloads(contributions, workers, wire, 4, out.data(), &nonfinite);
    EXPECT_EQ(folded.code(), absl::StatusCode::kInvalidArgument) << size;
    EXPECT_THAT(std::string(folded.message()), HasSubstr("contribution 1: expected 4 elements"));
    const absl::Status decoded = DecodePayload(contributions[1], wire, wire, 4, out.data());
    EXPECT_EQ(decoded.code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST_P(CodecTest, AnElementCountWhoseBytesWrapAroundIsRefused) {
  const DType wire = GetParam();
  const uint64_t elems =
      std::numeric_limits<uint64_t>::max() / SizeOf(wire) + 1;  // 0 bytes, mod 2^64
  const std::vector<Payload> contributions(1);
  const std::vector<uint32_t> workers = {1};
  uint64_t nonfinite = 0;
  EXPECT_FALSE(FoldPayloads(contributions, workers, wire, elems, nullptr, &nonfinite).ok());
  EXPECT_FALSE(DecodePayload(contributions[0], wire, wire, elems, nullptr).ok());
}

TEST_P(CodecTest, NoElementsFoldAndDecodeToNothing) {
  const DType wire = GetParam();
  const std::vector<Payload> contributions = {Payload(), Split({}, {0, 0})};
  const std::vector<uint32_t> workers = {1, 1};
  uint64_t nonfinite = 7;
  EXPECT_TRUE(FoldPayloads(contributions, workers, wire, 0, nullptr, &nonfinite).ok());
  EXPECT_EQ(nonfinite, 0u);
  EXPECT_TRUE(DecodePayload(contributions[1], wire, wire, 0, nullptr).ok());
}

TEST(CodecFoldTest, UnequalWorkerCountsGiveTheMeanOverWorkers) {
  const std::vector<uint32_t> workers = {8, 3, 1, 5};
  const size_t elems = 1000;
  std::mt19937_64 random(9);
  std::vector<Bytes> whole;
  std::vector<Payload> contributions;
  for (size_t k = 0; k < workers.size(); ++k) {
    whole.push_back(RandomElements<Fp32>(elems, 0, random));
    contributions.push_back(Split(whole[k], RandomLengths(whole[k].size(), 60, random)));
  }
  const Folded got = Fold(contributions, workers, DType::kFloat32, elems);
  ASSERT_TRUE(got.status.ok()) << got.status;
  for (size_t i = 0; i < elems; ++i) {
    double sum = 0;
    double magnitude = 0;
    for (size_t k = 0; k < workers.size(); ++k) {
      const double term = workers[k] * double{Fp32::Widen(LoadBits<Fp32>(whole[k].data(), i))};
      sum += term;
      magnitude += std::fabs(term);
    }
    // The 4 terms and the division each round by at most 2^-24; 6 covers their products.
    const double tolerance = 6 * std::ldexp(magnitude / 17, -24);
    ASSERT_NEAR(Fp32::Widen(LoadBits<Fp32>(got.out.data(), i)), sum / 17, tolerance) << i;
  }
}

TEST(CodecFoldTest, AnInfinityThatStraddlesTwoPiecesIsCounted) {
  Bytes bytes(4);
  StoreBits<Fp16>(0x3c00, bytes.data(), 0);
  StoreBits<Fp16>(Fp16::kInfinity, bytes.data(), 1);
  const Folded got = Fold({Split(bytes, {3})}, {1}, DType::kFloat16, 2);
  EXPECT_EQ(got.nonfinite, 1u);
  EXPECT_EQ(got.out, bytes);
}

TEST(CodecFoldTest, ContributionsThatMakeNoMeanAreRefused) {
  const Payload one = PayloadOf<float>({1});
  const auto code = [&](std::vector<Payload> contributions, std::vector<uint32_t> workers) {
    return Fold(contributions, workers, DType::kFloat32, 1).status.code();
  };
  EXPECT_EQ(code({}, {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({one, one}, {1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({one, one}, {1, 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({one, one}, {1, 1}), absl::StatusCode::kOk);
}

TEST(CodecFoldTest, FoldsWithoutWeightsDoNotDependOnWhereContributionsAreCut) {
  const size_t elems = 1000;
  std::mt19937_64 random(4);
  using enum thalweg::Fold;
  for (const auto fold : {kSum, kMin, kMax, kProduct}) {
    std::vector<Bytes> whole;
    std::vector<Payload> contributions;
    std::vector<const void*> inputs;
    for (size_t k = 0; k < 3; ++k) {
      whole.push_back(RandomElements<BFloat16>(elems, 20, random));
      contributions.push_back(Split(whole[k], RandomLengths(whole[k].size(), 60, random)));
    }
    for (const Bytes& bytes : whole) inputs.push_back(bytes.data());
    Bytes expected(elems * 2), got(elems * 2);
    const uint64_t nonfinite = FoldElements(fold, inputs, DType::kBFloat16, expected.data(), elems);
    uint64_t counted = 0;
    const absl::Status status =
        FoldPayloads(fold, contributions, DType::kBFloat16, elems, got.data(), &counted);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(got, expected) << Name(fold);
    EXPECT_EQ(counted, nonfinite) << Name(fold);
  }
}

TEST(CodecFoldTest, FoldsThatNeedWeightsOrIntegersAreRefused) {
  const std::vector<Payload> one = {PayloadOf<float>({1})};
  float out = 0;
  uint64_t nonfinite = 0;
  for (const auto fold : {thalweg::Fold::kMean, thalweg::Fold::kBitAnd, thalweg::Fold::kNone}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(FoldPayloads(fold, one, DType::kFloat32, 1, &out, &nonfinite)));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(
      FoldPayloads(thalweg::Fold::kSum, {}, DType::kFloat32, 1, &out, &nonfinite)));
}

TEST(CodecFoldTest, AnUnknownTypeIsRefused) {
  const auto unknown = static_cast<DType>(10);
  const std::vector<Payload> contributions(1);
  const std::vector<uint32_t> workers = {1};
  uint64_t nonfinite = 0;
  EXPECT_EQ(FoldPayloads(contributions, workers, unknown, 0, nullptr, &nonfinite).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodePayload(Payload(), unknown, unknown, 0, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CodecDecodeTest, TypesThatNoCodecPairsAreRefused) {
  for (DType wire : kAllTypes) {
    for (DType bucket : kAllTypes) {
      bool paired = false;
      for (DType codec : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        paired = paired || DenseType(bucket, {.wire = codec}) == wire;
      }
      EXPECT_EQ(DecodePayload(Payload(), wire, bucket, 0, nullptr).ok(), paired)
          << Name(wire) << " to " << Name(bucket);
    }
  }
}

}  // namespace
}  // namespace thalweg::dense_test
