// These tests send buckets through worker, sidecar, shard and back, and check sums, bits and
// counters.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/integration/cluster.h"
#include "tests/integration/reordering_shard.h"

namespace thalweg::allreduce_test {
namespace {

struct Shape {
  uint32_t nodes, workers, shards;
  DType codec;
  bool hosted = false;  // the first shards are in the nodes' sidecars
};

std::vector<float> Gradient(uint32_t rank, uint32_t bucket, uint64_t round, size_t elems) {
  std::mt19937_64 rng(rank * 1000003 + bucket * 1009 + round);
  std::normal_distribution<float> normal;
  std::vector<float> values(elems);
  for (float& v : values) v = normal(rng);
  return values;
}

// The buckets have less than a chunk, exactly one, and several with a rest (1024 floats per chunk).
constexpr size_t kElems[] = {7, 1024, 5000};
constexpr uint32_t kBuckets = 3;

BucketLayout LayoutOf(uint32_t bucket) {
  return {DType::kFloat32, {{absl::StrCat("p", bucket), {static_cast<int64_t>(kElems[bucket])}}}};
}

// Results hold what every worker got: [rank][round * kBuckets + bucket].
using Results = std::vector<std::vector<std::vector<std::byte>>>;

Results TrainInLockStep(Cluster& cluster, uint64_t rounds, DType codec, bool hosted = false) {
  auto sessions = cluster.ConnectAll([&](SessionOptions& o) {
    o.codec.fallback.wire = codec;
    if (hosted) o.shards = cluster.HostedPlaces();
  });
  Results results(sessions.size());
  std::vector<std::future<void>> workers;
  for (uint32_t rank = 0; rank < sessions.size(); ++rank) {
    EXPECT_TRUE(sessions[rank].ok()) << sessions[rank].status();
    workers.push_back(std::async(std::launch::async, [&, rank] {
      Session& session = **sessions[rank];
      for (uint32_t b = 0; b < kBuckets; ++b) {
        ASSERT_TRUE(session.RegisterBucket({b, 0}, LayoutOf(b)).ok());
      }
      for (uint64_t round = 1; round <= rounds; ++round) {
        std::vector<std::vector<float>> gradients;
        std::vector<std::future<Outcome>> pending;
        for (uint32_t b = 0; b < kBuckets; ++b) {
          gradients.push_back(Gradient(rank, b, round, kElems[b]));
          pending.push_back(SubmitAsync(session, {b, 0}, std::as_bytes(std::span(gradients[b]))));
        }
        for (auto& outcome : pending) {
          Outcome bytes = Get(outcome);
          ASSERT_TRUE(bytes.ok()) << bytes.status();
          results[rank].push_back(*std::move(bytes));
        }
      }
    }));
  }
  for (auto& worker : workers) Get(worker);
  return results;
}

class AllreduceTest : public ::testing::TestWithParam<Shape> {};

// Returns a bound on |got - mean| for values whose magnitudes sum to `magnitude` over W workers.
// Sums in float32 round at most 2W times (each share once per addition, twice divided), relative to
// partial sums bounded by the magnitude; each of two encodings (share, result) rounds to the
// codec's precision.
double Tolerance(double magnitude, uint32_t world, DType codec) {
  const double codec_eps = codec == DType::kFloat16    ? std::ldexp(1, -11)
                           : codec == DType::kBFloat16 ? std::ldexp(1, -8)
                                                       : 0;
  const double float_eps = std::ldexp(1, -24);
  // fp16 has an absolute floor too: half its smallest subnormal.
  return (magnitude / world) * (2 * world * float_eps + 2 * codec_eps) * 1.01 + std::ldexp(1, -24);
}

TEST_P(AllreduceTest, EveryWorkerGetsTheSameBitsOfTheMean) {
  const Shape shape = GetParam();
  Cluster cluster(shape.nodes, shape.workers, shape.shards);
  const uint32_t world = cluster.world_size();
  constexpr uint64_t kRounds = 3;
  const Results results = TrainInLockStep(cluster, kRounds, shape.codec, shape.hosted);
  for (uint32_t rank = 1; rank < world; ++rank) ASSERT_EQ(results[rank], results[0]);
  for (uint64_t round = 1; round <= kRounds; ++round) {
    for (uint32_t b = 0; b < kBuckets; ++b) {
      std::vector<double> sum(kElems[b]), magnitude(kElems[b]);
      for (uint32_t rank = 0; rank < world; ++rank) {
        const auto values = Gradient(rank, b, round, kElems[b]);
        for (size_t i = 0; i < values.size(); ++i) {
          sum[i] += values[i];
          magnitude[i] += std::abs(values[i]);
        }
      }
      const auto& bytes = results[0][(round - 1) * kBuckets + b];
      ASSERT_EQ(bytes.size(), kElems[b] * sizeof(float));
      std::vector<float> got(kElems[b]);
      std::memcpy(got.data(), bytes.data(), bytes.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], sum[i] / world, Tolerance(magnitude[i], world, shape.codec))
            << "bucket " << b << " element " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AllreduceTest,
    ::testing::Values(Shape{1, 1, 1, DType::kFloat32}, Shape{1, 4, 1, DType::kFloat32},
                      Shape{2, 2, 2, DType::kFloat32}, Shape{3, 1, 2, DType::kFloat32},
                      Shape{2, 3, 3, DType::kFloat16}, Shape{2, 2, 1, DType::kBFloat16},
                      Shape{2, 1, 2, DType::kFloat32, true}, Shape{3, 2, 4, DType::kFloat16, true},
                      Shape{3, 1, 2, DType::kFloat32, true}),
    [](const auto& info) {
      const Shape& s = info.param;
      return absl::StrCat(s.nodes, "nodes", s.workers, "workers", s.shards, "shards", Name(s.codec),
                          s.hosted ? "Hosted" : "");
    });

TEST(DeterminismTest, ArrivalOrderDoesNotChangeABit) {
  Results first;
  for (uint64_t seed : {1u, 2u, 3u}) {
    Cluster cluster(3, 2, 2, [&](Shard& shard) { return Reordering(shard, seed++); });
    const Results results = TrainInLockStep(cluster, 4, DType::kFloat32);
    if (first.empty()) first = results;
    EXPECT_EQ(results, first);
  }
}

TEST(PlacementTest, WorkersOfSeveralNodesAreToldHowTheShardsAreUsed) {
  Cluster several(2, 2, 2);
  for (const auto& session : several.ConnectAll()) {
    ASSERT_TRUE(session.ok()) << session.status();
    EXPECT_EQ((*session)->stats().num_shards, 2u);
    // Nothing is measured within one process.
    EXPECT_EQ((*session)->stats().placement, "2 shards sum equal shares");
  }
  Cluster alone(1, 1, 1);
  EXPECT_EQ((*alone.ConnectAll()[0])->stats().placement, "");
}

TEST(CountersTest, Fp16WireBytesAreExactlyHalfOfRawBytes) {
  Cluster cluster(2, 2, 2);
  TrainInLockStep(cluster, 2, DType::kFloat16);
  const uint64_t elems = kElems[0] + kElems[1] + kElems[2];
  for (const char* direction : {"sent", "received"}) {
    const Labels labels = {{"codec", "fp16"}, {"direction", direction}};
    const double raw =
        cluster.registry().GetCounter("thalweg_sidecar_raw_bytes_total", "", labels).Value();
    const double wire =
        cluster.registry().GetCounter("thalweg_sidecar_wire_bytes_total", "", labels).Value();
    EXPECT_EQ(raw, 2.0 * 2 * elems * 4);  // nodes × rounds × bytes; once per node, not per worker
    EXPECT_EQ(wire * 2, raw);
  }
}

// One of the two buckets has a single chunk, which takes a shorter path through the sidecar.
TEST(ReduceTest, BlockingReduceGivesEveryWorkerTheMeanInEveryRound) {
  for (const auto& [nodes, workers] : {std::pair{1u, 2u}, std::pair{2u, 1u}, std::pair{2u, 2u}}) {
    Cluster cluster(nodes, workers, 2);
    auto sessions = cluster.ConnectAll();
    const auto world = static_cast<float>(sessions.size());
    std::vector<std::future<void>> running;
    for (uint32_t rank = 0; rank < sessions.size(); ++rank) {
      running.push_back(std::async(std::launch::async, [&, rank] {
        Session& session = **sessions[rank];
        for (uint32_t b : {0u, 2u}) {
          ASSERT_TRUE(session.RegisterBucket({b, 0}, LayoutOf(b)).ok());
        }
        for (uint32_t round = 0; round < 50; ++round) {
          for (uint32_t b : {0u, 2u}) {
            // The sum of small integers is exact.
            const std::vector<float> share(kElems[b], static_cast<float>(rank * 4 + round));
            const auto reduced = session.Reduce({b, 0}, std::as_bytes(std::span(share)));
            ASSERT_TRUE(reduced.ok()) << reduced.status();
            std::vector<float> got(kElems[b]);
            ASSERT_EQ(reduced->bytes.size(), got.size() * sizeof(float));
            std::memcpy(got.data(), reduced->bytes.data(), reduced->bytes.size());
            const float mean = 2 * (world - 1) + static_cast<float>(round);
            ASSERT_EQ(got, std::vector<float>(kElems[b], mean));
          }
        }
      }));
    }
    for (auto& worker : running) Get(worker);
  }
}

TEST(ReduceTest, WorkerThatWaitsHearsWhyTheJobFailed) {
  Cluster cluster(2, 1, 1);
  auto sessions = cluster.ConnectAll();
  for (auto& session : sessions) ASSERT_TRUE((*session)->RegisterBucket({0, 0}, LayoutOf(0)).ok());
  const std::vector<float> share(kElems[0], 1.0f);
  auto waiting = std::async(std::launch::async, [&] {
    return (*sessions[0])->Reduce({0, 0}, std::as_bytes(std::span(share))).status();
  });
  (*sessions[1])->Close();
  const absl::Status why = Get(waiting);
  EXPECT_FALSE(why.ok());
  EXPECT_THAT(std::string(why.message()), ::testing::HasSubstr("job 'job'"));
  EXPECT_EQ((*sessions[0])->Reduce({0, 0}, std::as_bytes(std::span(share))).status(), why);
}

TEST(LayoutTest, RebuiltBucketsContinueUnderANewLayout) {
  Cluster cluster(2, 2, 1);
  auto sessions = cluster.ConnectAll();
  for (uint32_t generation = 0; generation < 3; ++generation) {
    const size_t elems = 2000 + generation * 1000;
    const BucketLayout layout{DType::kFloat32, {{"w", {static_cast<int64_t>(elems)}}}};
    const std::vector<float> ones(elems, 1.0f);
    std::vector<std::future<Outcome>> pending;
    for (auto& session : sessions) {
      ASSERT_TRUE((*session)->RegisterBucket({0, generation}, layout).ok());
      pending.push_back(SubmitAsync(**session, {0, generation}, std::as_bytes(std::span(ones))));
    }
    for (auto& outcome : pending) {
      const Outcome bytes = Get(outcome);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      EXPECT_EQ(std::memcmp(bytes->data(), ones.data(), bytes->size()), 0);
    }
  }
}

TEST(NonFiniteTest, InfinityReachesEveryWorkerAndIsCounted) {
  Cluster cluster(2, 1, 1);
  auto sessions = cluster.ConnectAll();
  const BucketLayout layout{DType::kFloat32, {{"w", {3}}}};
  const std::vector<float> gradients[] = {{1, INFINITY, 3}, {1, 2, NAN}};
  std::vector<std::future<Outcome>> pending;
  for (size_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE((*sessions[rank])->RegisterBucket({0, 0}, layout).ok());
    pending.push_back(
        SubmitAsync(**sessions[rank], {0, 0}, std::as_bytes(std::span(gradients[rank]))));
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    const Outcome bytes = Get(pending[rank]);
    ASSERT_TRUE(bytes.ok());
    float got[3];
    std::memcpy(got, bytes->data(), sizeof got);
    EXPECT_EQ(got[0], 1);
    EXPECT_EQ(got[1], INFINITY);
    EXPECT_TRUE(std::isnan(got[2]));
    EXPECT_EQ((*sessions[rank])->stats().nonfinite_elems, 2u);
  }
}

}  // namespace
}  // namespace thalweg::allreduce_test
