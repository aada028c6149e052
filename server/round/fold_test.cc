#include "server/round/fold.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/base/thread.h"
#include "kernels/codec/lossy.h"
#include "kernels/codec/lossy_reference.h"
#include "server/round/round_test_util.h"

namespace thalweg::fold_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr WireFormat kFedBack[] = {WireFormat::kInt8, WireFormat::kOneBit};

Bytes BytesOf(const Payload& payload) {
  Bytes bytes;
  for (const auto& piece : payload.pieces) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

ReferenceChunk ReferenceEncode(WireFormat wire, const Floats& x) {
  return wire == WireFormat::kInt8 ? ReferenceInt8(x) : ReferenceOneBit(x);
}

CompleteRound Round(WireFormat wire, uint64_t elems, std::vector<Payload> payloads,
                    std::vector<uint32_t> workers, uint64_t round = 1) {
  CompleteRound complete{{{7, 0, 4}, 2, round}, wire, elems, std::move(payloads)};
  complete.workers = std::move(workers);
  return complete;
}

Floats StoredIn(ChunkState& state) {
  MutexLock lock(state.mutex);
  return state.residual;
}

Floats Times(Floats values, float factor) {
  for (float& value : values) value *= factor;
  return values;
}

class FeedbackFoldTest : public ::testing::TestWithParam<WireFormat> {
 protected:
  // Shares are encoded shares of `values` with the values that they decode to.
  struct Shares {
    std::vector<Payload> payloads;
    std::vector<Floats> decoded;
  };
  static Shares Encode(const std::vector<Floats>& values) {
    Shares shares;
    for (const Floats& share : values) {
      ReferenceChunk chunk = ReferenceEncode(GetParam(), share);
      shares.payloads.push_back(Split(chunk.bytes, {}));
      shares.decoded.push_back(std::move(chunk.decoded));
    }
    return shares;
  }
  static Floats Decoded(const RoundResult& result) {
    Floats decoded(result.elems);
    EXPECT_TRUE(
        DecodeLossy(result.payload, GetParam(), DType::kFloat32, result.elems, decoded.data())
            .ok());
    return decoded;
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, FeedbackFoldTest, ::testing::ValuesIn(kFedBack),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(FeedbackFoldTest, ResultAndResidualAreTheDocumentedOnesRoundByRound) {
  const std::vector<uint32_t> workers = {2, 1, 4};
  std::mt19937_64 random(1);
  for (size_t elems : {0, 1, 300, 1025, 5000}) {
    ChunkState residual(elems);
    Floats expected_residual(elems);
    for (uint64_t round = 1; round <= 5; ++round) {
      std::vector<Floats> values;
      for (size_t node = 0; node < workers.size(); ++node) {
        values.push_back(RandomFloats(elems, round % 2 == 0 ? 500 : 0, random));
      }
      const Shares shares = Encode(values);
      const Floats mean = ReferenceMean(shares.decoded, workers);
      const Floats x = Sum(mean, expected_residual);
      const ReferenceChunk expected = ReferenceEncode(GetParam(), x);
      expected_residual = ResidualOf(x, expected.decoded, expected_residual);

      const auto result =
          FoldRound(Round(GetParam(), elems, shares.payloads, workers, round), 9, &residual);
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(BytesOf(result->payload), expected.bytes);
      ASSERT_EQ(BitsOf(StoredIn(residual)), BitsOf(expected_residual));
      ASSERT_EQ(result->nonfinite_elems, CountNonFinite(x));
      ASSERT_EQ(result->id, (RoundId{{7, 0, 4}, 2, round}));
      ASSERT_EQ(result->epoch, 9u);
      ASSERT_EQ(result->wire, GetParam());
      ASSERT_EQ(result->elems, elems);
      ASSERT_EQ(result->workers, 7u);
    }
  }
}

TEST_P(FeedbackFoldTest, NothingIsLeftOutOfPadding) {
  std::mt19937_64 random(6);
  ChunkState residual(3000, {{5, 1024}, {2500, 2600}});
  const Shares shares = Encode({RandomFloats(3000, 0, random)});
  ASSERT_TRUE(FoldRound(Round(GetParam(), 3000, shares.payloads, {1}), 9, &residual).ok());
  const ReferenceChunk expected = ReferenceEncode(GetParam(), shares.decoded[0]);
  Floats left = ResidualOf(shares.decoded[0], expected.decoded, Floats(3000));
  std::fill(left.begin() + 5, left.begin() + 1024, 0.0f);
  std::fill(left.begin() + 2500, left.begin() + 2600, 0.0f);
  EXPECT_EQ(BitsOf(StoredIn(residual)), BitsOf(left));
}

TEST_P(FeedbackFoldTest, ResultsDoNotDependOnALossScaleThatChanges) {
  constexpr size_t kElems = 3000;
  const std::vector<uint32_t> workers = {2, 1};
  std::mt19937_64 random(6);
  ChunkState plain(kElems), scaled(kElems);
  uint64_t number = 0;
  for (const float scale : {1024.0f, 1024.0f, 2048.0f, 2048.0f, 512.0f, 512.0f}) {
    ++number;
    std::vector<Floats> values, multiples;
    for (size_t node = 0; node < workers.size(); ++node) {
      values.push_back(RandomFloats(kElems, 0, random));
      multiples.push_back(Times(values.back(), scale));
    }
    auto round = Round(GetParam(), kElems, Encode(multiples).payloads, workers, number);
    round.loss_scale = scale;
    const auto got = FoldRound(round, 1, &scaled);
    const auto want =
        FoldRound(Round(GetParam(), kElems, Encode(values).payloads, workers, number), 1, &plain);
    ASSERT_TRUE(got.ok() && want.ok()) << got.status() << want.status();
    EXPECT_EQ(Decoded(*got), Times(Decoded(*want), scale)) << "round " << number;
    EXPECT_EQ(StoredIn(scaled), Times(StoredIn(plain), scale)) << "round " << number;
  }
}

double Norm(const Floats& values) {
  double sum = 0;
  for (float value : values) sum += double{value} * value;
  return std::sqrt(sum);
}

TEST_P(FeedbackFoldTest, SumOfResultsStaysWithinOneResidualOfTheSumOfMeans) {
  constexpr size_t kElems = 3000;
  constexpr uint64_t kRounds = 200;
  const std::vector<uint32_t> workers = {1, 2};
  std::mt19937_64 random(2);
  ChunkState residual(kElems);
  std::vector<double> means(kElems), results(kElems);
  double largest = 0;  // largest of all numbers that get rounded
  double largest_norm = 0;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    // All rounds have a common part, which adds up.
    std::vector<Floats> values;
    for (size_t node = 0; node < workers.size(); ++node) {
      values.push_back(RandomFloats(kElems, 0, random));
      for (size_t i = 0; i < kElems; ++i) values[node][i] += i % 2 == 0 ? 0.5f : -0.25f;
    }
    const Shares shares = Encode(values);
    const auto result =
        FoldRound(Round(GetParam(), kElems, shares.payloads, workers, round), 1, &residual);
    ASSERT_TRUE(result.ok()) << result.status();
    Floats decoded(kElems);
    ASSERT_TRUE(
        DecodeLossy(result->payload, GetParam(), DType::kFloat32, kElems, decoded.data()).ok());
    const Floats left = StoredIn(residual);
    Floats mean(kElems);
    for (size_t i = 0; i < kElems; ++i) {
      const double exact = (double{shares.decoded[0][i]} + 2 * double{shares.decoded[1][i]}) / 3;
      mean[i] = static_cast<float>(exact);
      means[i] += exact;
      results[i] += decoded[i];
      largest = std::max(
          {largest, std::fabs(3 * exact), double{std::fabs(decoded[i])} + std::fabs(left[i])});
    }
    largest_norm = std::max(largest_norm, Norm(mean));
  }
  const Floats left = StoredIn(residual);
  for (size_t i = 0; i < kElems; ++i) {
    // Each round rounds a product, a sum, a quotient, x and the residual, each by at most 2^-24 of
    // numbers no larger than `largest`.
    ASSERT_NEAR(results[i] + left[i], means[i], kRounds * 5 * std::ldexp(largest, -24)) << i;
  }
  // ‖residual‖ = √(1 − δ)·‖x‖ with ‖x‖ ≤ ‖mean‖ + ‖residual before‖, so it stays below ‖mean‖·√(1 −
  // δ) / (1 − √(1 − δ)). For onebit, δ = (mean |x|)² / mean x² of a rotated or short block, which
  // is at least 0.36 where mean |x| is 0.6 of the root mean square (0.80 for normal numbers); the
  // bound is then 4. int8 leaves out half a step of 1/125 of a block's largest element, which is at
  // most √256 times its root mean square: √(1 − δ) ≤ 16/250.
  const double most = GetParam() == WireFormat::kOneBit ? 4 : 0.07;
  EXPECT_LT(Norm(left), most * largest_norm);
}

TEST_P(FeedbackFoldTest, BadContributionIsNamedAndChangesNothing) {
  std::mt19937_64 random(3);
  const Shares shares = Encode({RandomFloats(600, 0, random), RandomFloats(600, 0, random)});
  ChunkState residual(600);
  ASSERT_TRUE(FoldRound(Round(GetParam(), 600, shares.payloads, {1, 1}), 1, &residual).ok());
  const Floats before = StoredIn(residual);
  std::vector<Payload> cut = shares.payloads;
  cut[1].pieces[0] = cut[1].pieces[0].first(cut[1].pieces[0].size() - 1);
  const absl::Status status =
      FoldRound(Round(GetParam(), 600, cut, {1, 1}, 2), 1, &residual).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("bucket 7 (part 4) round 2 chunk 2: contribution 1: expected"));
  EXPECT_EQ(BitsOf(StoredIn(residual)), BitsOf(before));
}

// Rounds of one chunk fold at the same time only if nodes break the protocol. In any order, a
// residual that one fold uses at a time loses nothing.
TEST_P(FeedbackFoldTest, FoldsOfOneChunkTakeTurns) {
  constexpr size_t kElems = 2048;
  constexpr int kThreads = 4;
  constexpr int kFolds = 25;
  std::mt19937_64 random(4);
  const Shares shares = Encode({RandomFloats(kElems, 0, random)});
  ChunkState residual(kElems);
  std::vector<std::vector<double>> results(kThreads, std::vector<double>(kElems));
  {
    std::vector<Thread> threads;
    for (auto& sum : results) {
      threads.emplace_back("fold", [&] {
        for (int i = 0; i < kFolds; ++i) {
          const auto result =
              FoldRound(Round(GetParam(), kElems, shares.payloads, {1}), 1, &residual);
          Floats decoded(kElems);
          ASSERT_TRUE(
              DecodeLossy(result->payload, GetParam(), DType::kFloat32, kElems, decoded.data())
                  .ok());
          for (size_t e = 0; e < kElems; ++e) sum[e] += decoded[e];
        }
      });
    }
  }
  const Floats left = StoredIn(residual);
  for (size_t e = 0; e < kElems; ++e) {
    double arrived = left[e];
    for (const auto& sum : results) arrived += sum[e];
    // Each fold rounds x and the residual; both are below 64 here.
    ASSERT_NEAR(arrived, kThreads * kFolds * double{shares.decoded[0][e]},
                kThreads * kFolds * 2 * std::ldexp(64.0, -24))
        << e;
  }
}

TEST(FoldTest, TopKIsTheMeanAtEveryIndexThatOccurs) {
  const std::vector<Payload> payloads = {Split(ReferenceTopK({{0, 1}, {5, -2}, {1024, 8}}), {}),
                                         Split(ReferenceTopK({{5, 6}, {3000, kInfinity}}), {}),
                                         Split(ReferenceTopK({{1024, -8}, {4999, 16}}), {})};
  const auto result = FoldRound(Round(WireFormat::kTopK, 5000, payloads, {1, 1, 2}), 1, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(BytesOf(result->payload),
            ReferenceTopK({{0, 0.25f}, {5, 1}, {1024, -2}, {3000, kInfinity}, {4999, 8}}));
  EXPECT_EQ(result->nonfinite_elems, 1u);
}

TEST(FoldTest, OtherFoldsThanTheMeanDoNotCountWorkers) {
  const std::vector<Payload> payloads = {PayloadOf(3), PayloadOf(-4), PayloadOf(2)};
  const auto folded = [&](Fold fold) {
    CompleteRound round = Round(WireFormat::kFloat32, 1, payloads, {5, 1, 1});
    round.collective.fold = fold;
    const auto result = FoldRound(round, 1, nullptr);
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->workers, 7u);
    return ValueOf(result->payload);
  };
  EXPECT_EQ(folded(Fold::kSum), 1);
  EXPECT_EQ(folded(Fold::kMin), -4);
  EXPECT_EQ(folded(Fold::kMax), 3);
  EXPECT_EQ(folded(Fold::kProduct), -24);
}

TEST(FoldTest, NonFiniteSumsAreCounted) {
  CompleteRound round =
      Round(WireFormat::kFloat32, 1, {PayloadOf(kInfinity), PayloadOf(1)}, {1, 1});
  round.collective.fold = Fold::kSum;
  EXPECT_EQ(FoldRound(round, 1, nullptr)->nonfinite_elems, 1u);
}

TEST(FoldTest, BytesPassUnchangedWhateverTheyAre) {
  CompleteRound round = Round(WireFormat::kInt8, 600, {PayloadOf(3)}, {2});
  round.collective = {Place::One(0), Place::All(), Fold::kNone};
  const auto result = FoldRound(round, 1, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->payload.owner, round.payloads[0].owner);
  EXPECT_EQ(result->elems, 600u);
  EXPECT_EQ(result->workers, 2u);
}

TEST(FoldTest, SumOfContributionsOfAnotherSizeIsRefusedNamingTheContribution) {
  CompleteRound round = Round(WireFormat::kFloat32, 2, {Payload()}, {1});
  round.collective.fold = Fold::kSum;
  const absl::Status status = FoldRound(round, 1, nullptr).status();
  EXPECT_EQ(status.message(),
            "bucket 7 (part 4) round 1 chunk 2: contribution 0: expected 2 elements of fp32, got 0 "
            "bytes");
}

TEST(FoldTest, MalformedTopKIsRefusedNamingTheContribution) {
  const std::vector<Payload> payloads = {Split(ReferenceTopK({{0, 1}}), {}),
                                         Split(ReferenceTopK({{10, 1}}), {})};
  const absl::Status status =
      FoldRound(Round(WireFormat::kTopK, 10, payloads, {1, 1}), 1, nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("bucket 7 (part 4) round 1 chunk 2"),
                                                   HasSubstr("contribution 1: topk payload")));
}

}  // namespace
}  // namespace thalweg::fold_test
