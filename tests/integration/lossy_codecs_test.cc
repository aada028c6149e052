// These tests run int8, onebit and topk, and policies that mix codecs, through whole clusters.
// kernels/codec tests the formats themselves; these tests check what must hold for whole jobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/sidecar/codec/parameter_states.h"
#include "tests/integration/reordering_shard.h"
#include "tests/integration/training.h"

namespace thalweg::lossy_codecs_test {
namespace {

constexpr uint64_t kStart = 2;

// Neither chunks nor blocks divide these sizes; each has several chunks.
BucketLayout Layout(uint32_t bucket) {
  return {DType::kFloat32,
          {{absl::StrCat("embed", bucket), {70, 33}},
           {absl::StrCat("w", bucket), {111, 50}},
           {absl::StrCat("b", bucket), {111}}}};
}
std::vector<BucketLayout> Layouts(uint32_t buckets) {
  std::vector<BucketLayout> layouts;
  for (uint32_t b = 0; b < buckets; ++b) layouts.push_back(Layout(b));
  return layouts;
}

Values Share(uint32_t rank, uint32_t bucket, uint64_t round) {
  std::mt19937_64 rng(rank * 1000003 + bucket * 1009 + round);
  std::normal_distribution<float> normal;
  Values values(Layout(bucket).Elems());
  for (float& v : values) v = normal(rng);
  return values;
}

using States = std::vector<std::vector<std::byte>>;  // by node

States Save(Training& training, const std::vector<uint32_t>& ranks) {
  States states;
  for (const uint32_t rank : ranks) {
    const absl::Status status = training.session(rank).SaveCodecState(
        [&](std::span<const std::byte> state) { states.emplace_back(state.begin(), state.end()); });
    EXPECT_TRUE(status.ok()) << status;
  }
  return states;
}

class LossyCodecsTest : public ::testing::TestWithParam<const char*> {
 protected:
  CodecPolicy codec() const { return *CodecPolicy::Parse(GetParam()); }
};

TEST_P(LossyCodecsTest, ReplicasAreBitIdenticalWhateverTheOrderOfArrival) {
  const auto train = [&](const Cluster::Wrap& wrap) {
    Cluster cluster(3, 2, 2, wrap);
    return Training(cluster, codec()).Run(0, Layouts(3), 8, Share);
  };
  const Results results = train({});
  for (const auto& other : results) EXPECT_EQ(other, results[0]);
  uint64_t seed = 0;
  EXPECT_EQ(train([&](Shard& shard) { return Reordering(shard, ++seed); }), results);
}

// The difference between what workers gave and what they got is what the nodes and the shards still
// hold: nothing is ever lost. Each of kRounds roundings of a float32 sum is at most 2^-24 of values
// that stay below 100 here; their sum is far below 1e-3.
TEST_P(LossyCodecsTest, WhatHasNotComeOutIsInTheResiduals) {
  constexpr uint64_t kRounds = 12;
  Cluster cluster(2, 2, 2);
  Training training(cluster, codec());
  const Results results = training.Run(0, Layouts(1), kRounds, Share);
  std::vector<double> missing(Layout(0).Elems());
  for (uint64_t round = 0; round < kRounds; ++round) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      const Values share = Share(rank, 0, round);
      for (size_t i = 0; i < missing.size(); ++i) missing[i] += share[i] / 4.0;
    }
    for (size_t i = 0; i < missing.size(); ++i) missing[i] -= results[0][round][0][i];
  }
  double norm = 0;
  for (const double m : missing) norm += m * m;
  EXPECT_GT(norm, 1e-3) << "nothing was lossy";

  for (const auto& bytes : Save(training, {0, 2})) {
    const auto states = DecodeParameterStates(bytes);
    ASSERT_TRUE(states.ok()) << states.status();
    size_t offset = 0;
    for (const TensorSpec& tensor : Layout(0).tensors) {
      const auto state = states->find(tensor.name);
      for (size_t i = 0; state != states->end() && i < tensor.Elems(); ++i) {
        const auto& residual = state->second->residual;
        const auto& shard_residual = state->second->shard_residual;
        if (!residual.empty()) missing[offset + i] -= residual.data()[i] / 2.0;
        if (!shard_residual.empty()) missing[offset + i] -= shard_residual[i];
      }
      offset += tensor.Elems();
    }
  }
  for (size_t i = 0; i < missing.size(); ++i) ASSERT_NEAR(missing[i], 0, 1e-3) << i;
}

TEST_P(LossyCodecsTest, LoadedStateGoesOnBitForBit) {
  constexpr uint64_t kBefore = 7, kAfter = 5;
  const auto later = [](uint32_t rank, uint32_t bucket, uint64_t round) {
    return Share(rank, bucket, kBefore + round);
  };
  States states;
  Results expected;
  {
    Cluster cluster(2, 2, 2);
    Training training(cluster, codec());
    training.Run(0, Layouts(2), kBefore, Share);
    states = Save(training, {0, 2});
    expected = training.Run(0, Layouts(2), kAfter, later);
  }
  Cluster cluster(2, 2, 2);
  Training training(cluster, codec());
  ASSERT_TRUE(training.session(0).LoadCodecState(states[0]).ok());
  ASSERT_TRUE(training.session(2).LoadCodecState(states[1]).ok());
  EXPECT_EQ(training.Run(0, Layouts(2), kAfter, later), expected);
  EXPECT_EQ(Save(training, {0}).size(), 1u);
}

TEST_P(LossyCodecsTest, RoundsBeforeTheStartAreExact) {
  Cluster cluster(2, 1, 1);
  Training training(cluster, codec());
  // Their mean over two workers is exact, because they are integers.
  const auto share = [](uint32_t rank, uint32_t, uint64_t round) {
    return Values(Layout(0).Elems(), static_cast<float>(uint64_t{4} * rank + 2 * round));
  };
  const Results results = training.Run(0, Layouts(1), kStart, share);
  for (uint64_t round = 0; round < kStart; ++round) {
    EXPECT_EQ(results[0][round][0], Values(Layout(0).Elems(), static_cast<float>(2 + 2 * round)));
  }
  EXPECT_EQ(training.session(0).stats().compressed_since, 0u);
  training.Run(0, Layouts(1), 1, share);
  EXPECT_EQ(training.session(0).stats().compressed_since, kStart + 1);
}

TEST_P(LossyCodecsTest, SmallestWindowAndManyBucketsDoNotBlockEachOther) {
  Cluster cluster(3, 1, 2, {}, /*window_chunks=*/1);
  Training training(cluster, codec());
  const Results results = training.Run(0, Layouts(12), 8, Share);
  for (const auto& other : results) EXPECT_EQ(other, results[0]);
}

INSTANTIATE_TEST_SUITE_P(Codecs, LossyCodecsTest,
                         ::testing::Values("int8", "onebit", "topk:0.02",
                                           "powersgd:rank=2,start=2;embed*=int8;dims<2=fp32"),
                         [](const auto& info) {
                           return absl::StrCat(info.index, "_",
                                               CodecPolicy::Parse(info.param)->fallback.Name());
                         });

// topk chooses in each chunk, and other formats have blocks.
TEST(ShardsOfLossyCodecsTest, ResultsAreTheSameWithAnyNumber) {
  const BucketLayout layout{DType::kFloat32, {{"w", {1000, 1100}}}};
  const auto train = [&](const char* codec, uint32_t shards) {
    Cluster cluster(2, 1, shards);
    Training training(cluster, *CodecPolicy::Parse(codec));
    return training.Run(0, {layout}, 3, [&](uint32_t rank, uint32_t, uint64_t round) {
      std::mt19937_64 rng(rank + uint64_t{2} * round);
      std::normal_distribution<float> normal;
      Values values(layout.Elems());
      for (float& v : values) v = normal(rng);
      return values;
    });
  };
  for (const char* codec : {"int8:start=0", "onebit:start=0", "topk:ratio=0.01,start=0"}) {
    EXPECT_EQ(train(codec, 1), train(codec, 3)) << codec;
  }
}

// Returns a compressed round's bytes divided by those of fp32, headers and scales included.
double BytesSent(const char* codec, bool received) {
  Cluster cluster(2, 1, 2);
  Training training(cluster, *CodecPolicy::Parse(codec));
  const BucketLayout layout{DType::kFloat32, {{"w", {1000, 1000}}}};
  training.Run(0, {layout}, 1, [&](uint32_t rank, uint32_t, uint64_t round) {
    std::mt19937_64 rng(rank + uint64_t{2} * round);
    std::normal_distribution<float> normal;
    Values values(layout.Elems());
    for (float& v : values) v = normal(rng);
    return values;
  });
  const SessionStats stats = training.session(0).stats();
  const uint64_t bytes = received ? stats.wire_bytes_received : stats.wire_bytes_sent;
  return static_cast<double>(bytes) / static_cast<double>(4 * layout.Elems());
}

TEST(LossyBytesTest, BothDirectionsAreSmall) {
  for (const bool received : {false, true}) {
    EXPECT_LE(BytesSent("int8:start=0", received), 0.26);
    EXPECT_LE(BytesSent("onebit:start=0", received), 0.035);
    // Both nodes' entries come back: 4 bytes each and a gap of one or two.
    EXPECT_LE(BytesSent("topk:ratio=0.01,start=0", received), received ? 0.03 : 0.015);
  }
}

TEST(PolicyTest, RulesDecideTensorByTensor) {
  Cluster cluster(2, 1, 2);
  Training training(cluster, *CodecPolicy::Parse("onebit:start=0;embed*=fp32;dims<2=fp16"));
  const Results results = training.Run(0, Layouts(1), 1, Share);
  const Values a = Share(0, 0, 0), b = Share(1, 0, 0);
  const size_t embed = Layout(0).tensors[0].Elems(), w = Layout(0).tensors[1].Elems();
  for (size_t i = 0; i < a.size(); ++i) {
    const float got = results[0][0][0][i];
    const float mean = (a[i] + b[i]) / 2;
    if (i < embed) {
      ASSERT_EQ(got, mean) << "fp32 is exact";
    } else if (i >= embed + w) {
      // Two shares and their mean are each rounded to 11 bits; the shares are below 8.
      ASSERT_NEAR(got, mean, 8 * 3 * 0x1p-12f);
    }
  }
  const double raw = 4.0 * static_cast<double>(a.size());
  EXPECT_LT(static_cast<double>(training.session(0).stats().wire_bytes_sent),
            raw * embed / static_cast<double>(a.size()) + 4 * w * 0.05 + 2 * 111 + 1);
}

// A DistantShard pretends to be behind a link of some speed.
class DistantShard : public ForwardingShard {
 public:
  DistantShard(Shard& shard, double bytes_per_second)
      : ForwardingShard(shard, ReorderMembers(1)), bytes_per_second_(bytes_per_second) {}
  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t, TimePoint, const std::stop_token&) override {
    return LinkSpeed{bytes_per_second_, std::chrono::milliseconds(1)};
  }

 private:
  const double bytes_per_second_;
};

// Shards would refuse choices that differ between nodes: training must work with any links.
TEST(AutoTest, ChoosesByTheSlowestLinkAlikeOnAllNodes) {
  const BucketLayout layout{DType::kFloat32, {{"w", {700, 900}}}};
  const auto share = [&](uint32_t rank, uint32_t, uint64_t) {
    return Values(layout.Elems(), static_cast<float>(rank));
  };
  const auto chosen = [&](double slowest) {
    uint32_t node = 0;
    Cluster cluster(2, 1, 1, [&](Shard& shard) {
      return std::make_unique<DistantShard>(shard, node++ == 0 ? 1e12 : slowest);
    });
    Training training(cluster, *CodecPolicy::Parse("auto:rank=2,start=1"));
    const Results results = training.Run(0, {layout}, 4, share);
    EXPECT_EQ(results[0], results[1]);
    for (const char* codec : {"fp32", "fp16", "int8", "powersgd"}) {
      const Labels labels = {{"codec", codec}};
      Gauge& buckets = cluster.registry().GetGauge("thalweg_sidecar_auto_buckets", "", labels);
      if (buckets.Value() > 0) return std::string(codec);
    }
    return std::string();
  };
  // 2.5 MB take 25 s, their factors of rank 2 0.13 s: more than any processor needs to compute
  // them.
  EXPECT_EQ(chosen(1e5), "powersgd");
  // Here they take 2.5 us, less than the second round trip of factors.
  EXPECT_THAT(chosen(1e12), ::testing::AnyOf("fp32", "fp16", "int8"));
}

TEST(LossyNonfiniteTest, CrossesAsTheFormatSaysAndLeavesNoTrace) {
  constexpr uint64_t kBadRound = 4;
  constexpr size_t kBadElem = 100;
  for (const char* codec : {"int8", "onebit", "topk:0.02"}) {
    Cluster cluster(2, 1, 1);
    Training training(cluster, *CodecPolicy::Parse(codec));
    const Results results =
        training.Run(0, Layouts(1), 8, [](uint32_t rank, uint32_t bucket, uint64_t round) {
          Values values = Share(rank, bucket, round);
          if (round == kBadRound && rank == 1) {
            values[kBadElem] = std::numeric_limits<float>::infinity();
          }
          return values;
        });
    for (uint64_t round = 0; round < 8; ++round) {
      const Values& got = results[0][round][0];
      ASSERT_EQ(std::memcmp(got.data(), results[1][round][0].data(), got.size() * 4), 0);
      EXPECT_EQ(std::isfinite(got[kBadElem]), round != kBadRound) << codec << " " << round;
      if (round == kBadRound) continue;
      for (const float value : got) ASSERT_TRUE(std::isfinite(value)) << codec << " " << round;
    }
    EXPECT_GE(training.session(0).stats().nonfinite_elems, 1u) << codec;
  }
}

}  // namespace
}  // namespace thalweg::lossy_codecs_test
