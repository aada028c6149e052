#include <algorithm>
#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hwy/highway.h"
#include "kernels/codec/lossy.h"
#include "kernels/codec/lossy_reference.h"

namespace thalweg::lossy_fold_test {
namespace {

using ::testing::HasSubstr;

Bytes Encode(WireFormat format, const Floats& values, Floats* residual) {
  Bytes bytes(MaxEncodedBytes(format, values.size()));
  const Encoded encoded =
      EncodeLossy(format, 0.05, values.data(), residual == nullptr ? nullptr : residual->data(),
                  values.size(), bytes.data());
  bytes.resize(encoded.bytes);
  return bytes;
}

Floats Decode(WireFormat format, const Payload& payload, size_t elems) {
  Floats decoded(elems);
  EXPECT_TRUE(DecodeLossy(payload, format, DType::kFloat32, elems, decoded.data()).ok());
  return decoded;
}

struct Folded {
  absl::Status status;
  Bytes bytes;
  Floats residual;
  uint64_t nonfinite = 0;
};

Folded Fold(WireFormat format, const std::vector<Payload>& contributions,
            const std::vector<uint32_t>& workers, size_t elems, const Floats& residual) {
  Folded folded;
  folded.residual = residual;
  folded.bytes.resize(MaxFoldedBytes(contributions, format, elems));
  const auto encoded =
      FoldLossy(contributions, workers, format, elems,
                residual.empty() ? nullptr : folded.residual.data(), folded.bytes.data());
  folded.status = encoded.status();
  if (encoded.ok()) {
    folded.bytes.resize(encoded->bytes);
    folded.nonfinite = encoded->nonfinite_elems;
  }
  return folded;
}

class LossyFoldTest : public ::testing::TestWithParam<WireFormat> {
 protected:
  // Makes encoded shares of nodes, in one piece each, and the values that they decode to.
  void MakeContributions(size_t count, size_t elems, unsigned special_every,
                         std::mt19937_64& random) {
    encoded_.clear();
    decoded_.clear();
    for (size_t k = 0; k < count; ++k) {
      encoded_.push_back(Encode(GetParam(), RandomFloats(elems, special_every, random), nullptr));
      decoded_.push_back(Decode(GetParam(), Split(encoded_.back(), {}), elems));
    }
  }

  std::vector<Payload> Pieces(std::mt19937_64& random) const {
    std::vector<Payload> payloads;
    for (const Bytes& bytes : encoded_) {
      payloads.push_back(Split(bytes, RandomLengths(bytes.size(), 700, random)));
    }
    return payloads;
  }

  std::vector<Bytes> encoded_;
  std::vector<Floats> decoded_;
};
INSTANTIATE_TEST_SUITE_P(Formats, LossyFoldTest, ::testing::ValuesIn(kLossyFormats),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(LossyFoldTest, EqualsDecodingTheMeanAndEncodingAgain) {
  const WireFormat format = GetParam();
  std::mt19937_64 random(31);
  for (size_t elems : kLossySizes) {
    for (const std::vector<uint32_t>& workers : {std::vector<uint32_t>{1},
                                                 {1, 1},
                                                 {3, 1, 4},
                                                 {2, 1, 2, 1},
                                                 {1, 2, 1, 1, 5},
                                                 {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}}) {
      MakeContributions(workers.size(), elems, workers.size() % 2 == 0 ? 0 : 500, random);
      const Floats mean = ReferenceMean(decoded_, workers);
      const Floats before = RandomFloats(elems, 0, random);
      Floats expected_residual = before;
      const Bytes expected = Encode(format, mean, &expected_residual);
      for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
        const ForcedTarget forced(target);
        const Folded got = Fold(format, Pieces(random), workers, elems, before);
        ASSERT_TRUE(got.status.ok()) << got.status;
        ASSERT_EQ(got.nonfinite, CountNonFinite(mean));
        if (format == WireFormat::kTopK) {
          // Nothing is rounded away: the sums are not encoded again, and the residual is unchanged.
          // Adding 0 turns −0 into 0, because an absent element is 0.
          const Floats zeros(elems);
          const Floats result = Decode(format, Split(got.bytes, {}), elems);
          ASSERT_EQ(BitsOf(Sum(result, zeros)), BitsOf(Sum(mean, zeros)));
          ASSERT_EQ(BitsOf(got.residual), BitsOf(before));
        } else {
          ASSERT_EQ(got.bytes, expected) << hwy::TargetName(target) << ", " << elems;
          ASSERT_EQ(BitsOf(got.residual), BitsOf(expected_residual));
        }
      }
    }
  }
}

TEST_P(LossyFoldTest, OnlyTheRatioOfWorkerCountsMatters) {
  std::mt19937_64 random(32);
  MakeContributions(2, 700, 0, random);
  const auto fold = [&](std::vector<uint32_t> workers) {
    return Fold(GetParam(), Pieces(random), workers, 700, {}).bytes;
  };
  EXPECT_EQ(fold({2, 2}), fold({1, 1}));
  EXPECT_EQ(fold({3, 9}), fold({1, 3}));
  EXPECT_NE(fold({1, 3}), fold({1, 1}));
}

// Both directions lose something in each round and make up for it later.
TEST_P(LossyFoldTest, NothingIsLostOverManyRoundsAndBothDirections) {
  constexpr size_t kElems = 1500;
  constexpr size_t kNodes = 3;
  const std::vector<uint32_t> workers(kNodes, 1);
  std::mt19937_64 random(33);
  std::vector<Floats> node_residuals(kNodes, Floats(kElems));
  Floats shard_residual(kElems);
  std::vector<double> sent(kElems);
  std::vector<double> arrived(kElems);
  double largest = 0;
  const int rounds = 100;
  for (int round = 0; round < rounds; ++round) {
    std::vector<Payload> contributions;
    for (Floats& residual : node_residuals) {
      const Floats values = RandomFloats(kElems, 0, random);
      for (size_t i = 0; i < kElems; ++i) {
        sent[i] += double{values[i]} / kNodes;
        largest = std::max(largest, double{std::fabs(values[i] + residual[i])});
      }
      contributions.push_back(Split(Encode(GetParam(), values, &residual), {}));
    }
    const Folded folded = Fold(GetParam(), contributions, workers, kElems, shard_residual);
    ASSERT_TRUE(folded.status.ok()) << folded.status;
    shard_residual = folded.residual;
    const Floats result = Decode(GetParam(), Split(folded.bytes, {}), kElems);
    for (size_t i = 0; i < kElems; ++i) {
      arrived[i] += result[i];
      largest = std::max(largest, double{std::fabs(result[i])} + std::fabs(shard_residual[i]));
    }
  }
  for (size_t i = 0; i < kElems; ++i) {
    double held = shard_residual[i];
    for (const Floats& residual : node_residuals) held += double{residual[i]} / kNodes;
    // Each round rounds twice at a node, and at the shard three sums, the division, x and its
    // residual: at most eight times, by 2^-24 of at most the three nodes' largest values together.
    const double tolerance = rounds * 8 * std::ldexp(kNodes * largest, -24);
    ASSERT_NEAR(arrived[i] + held, sent[i], tolerance) << i;
  }
}

TEST_P(LossyFoldTest, BlocksOfWhichNobodySendsAnythingKeepTheirResidual) {
  constexpr size_t kElems = 3000;  // blocks of onebit: two whole ones and a shorter one
  std::mt19937_64 random(35);
  const Floats before = RandomFloats(kElems, 0, random);
  for (const size_t used : {size_t{1023}, size_t{1024}, size_t{2500}}) {
    Floats values(kElems);
    values[used] = 1;
    const Bytes bytes = Encode(GetParam(), values, nullptr);
    const Folded folded =
        Fold(GetParam(), {Split(bytes, {}), Split(bytes, {})}, {1, 2}, kElems, before);
    ASSERT_TRUE(folded.status.ok()) << folded.status;
    const Floats result = Decode(GetParam(), Split(folded.bytes, {}), kElems);
    const size_t block = std::max<size_t>(1, FindLossy(GetParam())->block_elems);
    for (size_t i = 0; i < kElems; ++i) {
      if (i / block == used / block) continue;
      ASSERT_EQ(result[i], 0) << i;
      ASSERT_EQ(folded.residual[i], before[i]) << i;
    }
    if (GetParam() != WireFormat::kTopK) {
      ASSERT_NE(folded.residual[used], before[used]);
    }
  }
}

TEST_P(LossyFoldTest, ABadContributionIsNamedAndChangesNothing) {
  std::mt19937_64 random(34);
  const size_t elems = 600;
  MakeContributions(2, elems, 0, random);
  encoded_[1].pop_back();
  const Floats residual(elems, 1);
  const Folded folded = Fold(GetParam(), Pieces(random), {1, 1}, elems, residual);
  EXPECT_TRUE(absl::IsInvalidArgument(folded.status));
  EXPECT_THAT(std::string(folded.status.message()), HasSubstr("contribution 1: "));
  EXPECT_EQ(folded.residual, residual);
}

TEST_P(LossyFoldTest, ContributionsThatMakeNoMeanAreRefused) {
  const Payload one = Split(Encode(GetParam(), {1}, nullptr), {});
  const auto ok = [&](std::vector<Payload> contributions, std::vector<uint32_t> workers) {
    return Fold(GetParam(), contributions, workers, 1, {}).status.ok();
  };
  EXPECT_FALSE(ok({}, {}));
  EXPECT_FALSE(ok({one, one}, {1}));
  EXPECT_FALSE(ok({one, one}, {1, 0}));
  EXPECT_TRUE(ok({one, one}, {1, 1}));
}

TEST_P(LossyFoldTest, NonFiniteGradientsOfOneNodeReachAll) {
  Floats good(1100, 1);
  Floats bad = good;
  bad[3] = kNaN;
  const std::vector<Payload> contributions = {Split(Encode(GetParam(), good, nullptr), {}),
                                              Split(Encode(GetParam(), bad, nullptr), {})};
  const Floats residual(1100);
  const Folded folded = Fold(GetParam(), contributions, {1, 1}, 1100, residual);
  ASSERT_TRUE(folded.status.ok()) << folded.status;
  const Floats result = Decode(GetParam(), Split(folded.bytes, {}), 1100);
  EXPECT_TRUE(std::isnan(result[3]));
  EXPECT_FALSE(std::isnan(result[1024]));
  // onebit sends whole blocks.
  EXPECT_EQ(folded.nonfinite, GetParam() == WireFormat::kOneBit ? 1024u : 1u);
  EXPECT_EQ(CountNonFinite(folded.residual), 0u);
}

TEST(LossyFoldFormatTest, OtherFormatsAreRefused) {
  const std::vector<Payload> contributions(1);
  for (int value : {0, 1, 4, 15, 19}) {
    const auto status = FoldLossy(contributions, std::vector<uint32_t>{1},
                                  static_cast<WireFormat>(value), 0, nullptr, nullptr)
                            .status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << value;
  }
}

}  // namespace
}  // namespace thalweg::lossy_fold_test
