// These tests run PowerSGD through whole clusters and check what must hold for any numbers.
// tests/e2e compares the numbers with torch's hook.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/reordering_shard.h"
#include "tests/integration/training.h"

namespace thalweg::compression_test {
namespace {

constexpr int64_t kRows = 24;
constexpr int64_t kColumns = 32;
constexpr int64_t kBias = 5;
constexpr uint64_t kStart = 2;

CodecPolicy Codec(DType wire = DType::kFloat32) {
  return {{.kind = CodecKind::kPowerSgd, .wire = wire, .rank = 2, .start = kStart}, {}};
}

// Returns `count` matrices from number `first` on, each with a bias that is not compressed.
BucketLayout Layout(uint32_t first, uint32_t count) {
  BucketLayout layout;
  for (uint32_t i = first; i < first + count; ++i) {
    layout.tensors.push_back({absl::StrCat("w", i), {kRows, kColumns}});
    layout.tensors.push_back({absl::StrCat("b", i), {kBias}});
  }
  return layout;
}

Values Gradient(uint32_t rank, uint32_t bucket, uint64_t round, uint64_t elems) {
  std::mt19937_64 rng(rank * 1000003 + bucket * 1009 + round);
  std::normal_distribution<float> normal;
  Values values(elems);
  for (float& v : values) v = normal(rng);
  return values;
}

Values RandomShare(uint32_t rank, uint32_t bucket, uint64_t round) {
  return Gradient(rank, bucket, round, Layout(0, 1).Elems());
}

std::vector<BucketLayout> OneMatrixEach(uint32_t buckets) {
  std::vector<BucketLayout> layouts;
  for (uint32_t b = 0; b < buckets; ++b) layouts.push_back(Layout(b, 1));
  return layouts;
}

struct Shape {
  uint32_t nodes, workers, shards;
  DType wire;
};

class CompressionTest : public ::testing::TestWithParam<Shape> {};

TEST_P(CompressionTest, ReplicasAreBitIdenticalWhateverTheOrderOfArrival) {
  const Shape shape = GetParam();
  const auto train = [&](const Cluster::Wrap& wrap) {
    Cluster cluster(shape.nodes, shape.workers, shape.shards, wrap);
    return Training(cluster, Codec(shape.wire)).Run(0, OneMatrixEach(4), 8, RandomShare);
  };
  const Results results = train({});
  for (const auto& other : results) EXPECT_EQ(other, results[0]);
  uint64_t seed = 0;
  EXPECT_EQ(train([&](Shard& shard) { return Reordering(shard, ++seed); }), results);
}

INSTANTIATE_TEST_SUITE_P(Clusters, CompressionTest,
                         ::testing::Values(Shape{2, 1, 1, DType::kFloat32},
                                           Shape{3, 2, 2, DType::kFloat32},
                                           Shape{2, 2, 3, DType::kFloat16}),
                         [](const auto& info) {
                           const Shape& s = info.param;
                           return absl::StrCat(s.nodes, "nodes", s.workers, "workers", s.shards,
                                               "shards_", Name(s.wire));
                         });

// A Balance is the sum of all rounds' means over the workers, minus the sum of the results,
// relative to the former.
class Balance {
 public:
  void Add(const Results& results, const Training::Source& source, uint32_t bucket,
           size_t of_bucket_begin, size_t of_total_begin, size_t elems) {
    total_.resize(std::max(total_.size(), of_total_begin + elems));
    missing_.resize(total_.size());
    for (uint64_t round = 0; round < results[0].size(); ++round) {
      const Values& got = results[0][round][bucket];
      for (size_t i = 0; i < elems; ++i) {
        missing_[of_total_begin + i] -= got[of_bucket_begin + i];
      }
      for (uint32_t rank = 0; rank < results.size(); ++rank) {
        const Values share = source(rank, bucket, round);
        for (size_t i = 0; i < elems; ++i) {
          const double mean = share[of_bucket_begin + i] / static_cast<double>(results.size());
          total_[of_total_begin + i] += mean;
          missing_[of_total_begin + i] += mean;
        }
      }
    }
  }
  double Relative() const { return Norm(missing_) / Norm(total_); }

 private:
  static double Norm(const std::vector<double>& v) {
    double sum = 0;
    for (double x : v) sum += x * x;
    return std::sqrt(sum);
  }
  std::vector<double> total_;
  std::vector<double> missing_;
};

// Each round of zeros takes the largest part out of the residual, so after enough of them
// everything that workers gave has come out. kRows / rank rounds would suffice if every round took
// the best directions; twice that is plenty for a power iteration. What remains is rounding: 2^-24
// per round and operation, far below 1e-4.
constexpr uint64_t kFlushRounds = 48;

TEST(CompressionFeedbackTest, WhatIsLeftOutComesLater) {
  Cluster cluster(2, 2, 2);
  Training training(cluster, Codec());
  const auto layouts = OneMatrixEach(1);
  const size_t elems = layouts[0].Elems();
  const auto zeros = [&](uint32_t, uint32_t, uint64_t) { return Values(elems); };
  Balance balance;
  balance.Add(training.Run(0, layouts, 10, RandomShare), RandomShare, 0, 0, 0, elems);
  EXPECT_GT(balance.Relative(), 0.1) << "nothing was compressed";
  // The two largest of 24 directions of a random matrix carry about a quarter of the squared norm.
  const double error =
      cluster.registry().GetGauge("thalweg_sidecar_compression_error_ratio", "").Value();
  EXPECT_GT(error, 0.8);
  EXPECT_LT(error, 1.0);
  balance.Add(training.Run(1, layouts, kFlushRounds, zeros), zeros, 0, 0, 0, elems);
  EXPECT_LT(balance.Relative(), 1e-4);
}

TEST(CompressionFeedbackTest, ResidualFollowsItsParameterIntoAnotherBucket) {
  Cluster cluster(2, 1, 1);
  Training training(cluster, Codec());
  const size_t each = Layout(0, 1).Elems();
  const auto zeros = [&](uint32_t, uint32_t, uint64_t) { return Values(2 * each); };
  const Results apart = training.Run(0, OneMatrixEach(2), 10, RandomShare);
  // DDP rebuilds its buckets: parameter 1, then 0, in one bucket.
  BucketLayout both = Layout(1, 1);
  const BucketLayout first = Layout(0, 1);
  both.tensors.insert(both.tensors.end(), first.tensors.begin(), first.tensors.end());
  const Results together = training.Run(1, {both}, kFlushRounds, zeros);
  for (uint32_t b : {0u, 1u}) {
    Balance balance;
    balance.Add(apart, RandomShare, b, 0, 0, each);
    balance.Add(together, zeros, 0, (1 - b) * each, 0, each);
    EXPECT_LT(balance.Relative(), 1e-4) << "bucket " << b;
  }
}

TEST(CompressionStartTest, RoundsBeforeTheStartAreExactAndBytesDropAfterIt) {
  Cluster cluster(2, 1, 1);
  Training training(cluster, Codec());
  const auto layouts = OneMatrixEach(1);
  const uint64_t raw = layouts[0].Elems() * sizeof(float);
  // Their mean over two workers is exact, because they are integers.
  const auto share = [&](uint32_t rank, uint32_t, uint64_t round) {
    return Values(layouts[0].Elems(), static_cast<float>(4 * rank + 2 * round));
  };
  const Results before = training.Run(0, layouts, kStart, share);
  for (uint64_t round = 0; round < kStart; ++round) {
    EXPECT_EQ(before[0][round][0], Values(layouts[0].Elems(), static_cast<float>(2 + 2 * round)));
  }
  EXPECT_EQ(training.session(0).stats().wire_bytes_sent, kStart * raw);
  training.Run(1, layouts, 1, share);
  EXPECT_EQ(training.session(0).stats().wire_bytes_sent - kStart * raw,
            (2 * (kRows + kColumns) + kBias) * sizeof(float));
}

// Returns the state of one of Layout(0, 1)'s matrices after `rounds` rounds that left nothing out,
// as server/sidecar/codec/parameter_states.h describes it.
std::vector<std::byte> StateAfter(uint64_t rounds) {
  std::string bytes;
  const auto add = [&bytes](auto value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  bytes.append("TWS3");
  add(uint32_t{1});
  add(uint32_t{2});
  bytes.append("w0");
  add(rounds);
  add(uint64_t{0});
  add(uint64_t{kRows * kColumns});
  add(uint64_t{0});
  bytes.append(kRows * kColumns * sizeof(float), '\0');
  const auto view = std::as_bytes(std::span(bytes));
  return {view.begin(), view.end()};
}

TEST(CompressionStateTest, LoadedStateDecidesWhetherTheNextRoundIsCompressed) {
  Cluster cluster(2, 1, 1);
  Training training(cluster, Codec());
  const auto layouts = OneMatrixEach(1);
  const auto share = [&](uint32_t rank, uint32_t, uint64_t) {
    return Values(layouts[0].Elems(), static_cast<float>(4 * rank));
  };
  const uint64_t raw = layouts[0].Elems() * sizeof(float);
  uint64_t sent = 0;
  // The first round is compressed: the bucket itself has not been exchanged before.
  for (const uint64_t rounds : {10u, 0u, 0u, 10u, 1u}) {
    for (uint32_t rank : {0u, 1u}) {
      ASSERT_TRUE(training.session(rank).LoadCodecState(StateAfter(rounds)).ok());
    }
    training.Run(0, layouts, 1, share);
    const uint64_t now = training.session(0).stats().wire_bytes_sent;
    EXPECT_EQ(now - sent == raw, rounds < kStart) << rounds;
    sent = now;
  }
}

TEST(CompressionStateTest, StateOfAnotherShapeOrNoStateFailsTheJobWithTheReason) {
  for (const bool is_state : {true, false}) {
    Cluster cluster(2, 1, 1);
    Training training(cluster, Codec());
    auto state = StateAfter(1);
    if (!is_state) state.resize(9);
    ASSERT_TRUE(training.session(0).LoadCodecState(state).ok());
    BucketLayout layout{DType::kFloat32, {{"w0", {kRows, kColumns + 1}}}};
    Session& session = training.session(0);
    session.RegisterBucket({0, 0}, layout).IgnoreError();
    const Values share(layout.Elems());
    const auto reduced = session.Reduce({0, 0}, std::as_bytes(std::span(share)));
    EXPECT_THAT(std::string(reduced.status().message()),
                ::testing::HasSubstr(is_state ? "'w0' has 792 elements, its codec state 768"
                                              : "codec state is cut off"));
  }
}

TEST(CompressionWindowTest, SmallestWindowAndManyBucketsDoNotBlockEachOther) {
  Cluster cluster(3, 1, 2, {}, /*window_chunks=*/1);
  Training training(cluster, Codec());
  const Results results = training.Run(0, OneMatrixEach(30), 12, RandomShare);
  for (const auto& other : results) EXPECT_EQ(other, results[0]);
}

TEST(CompressionNonfiniteTest, ReachesEveryWorkerElementByElementAndLeavesNoTrace) {
  constexpr uint64_t kBadRound = 5;
  constexpr size_t kBadElem = 100;
  const auto layouts = OneMatrixEach(2);
  const auto share = [&](float bad) {
    return [bad](uint32_t rank, uint32_t bucket, uint64_t round) {
      Values values = RandomShare(rank, bucket, round);
      if (round == kBadRound && bucket == 0 && rank == 1) values[kBadElem] = bad;
      return values;
    };
  };
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Cluster cluster(2, 1, 2);
    Training training(cluster, Codec());
    const Results results = training.Run(0, layouts, 10, share(bad));
    for (uint64_t round = 0; round < 10; ++round) {
      const Values& got = results[0][round][0];
      ASSERT_EQ(std::memcmp(got.data(), results[1][round][0].data(), got.size() * 4), 0);
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(!std::isfinite(got[i]), round == kBadRound && i == kBadElem) << round << " " << i;
        if (round != kBadRound || i == kBadElem) continue;
        const float a = share(bad)(0, 0, round)[i], b = share(bad)(1, 0, round)[i];
        ASSERT_EQ(got[i], (a + b) / 2) << "the rest of that round is what it is without codec";
      }
    }
    EXPECT_EQ(training.session(0).stats().nonfinite_elems, 1u);
  }
}

}  // namespace
}  // namespace thalweg::compression_test
