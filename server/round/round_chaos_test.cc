// This test sends a hundred thousand chunks through one round engine, while the simulated network
// loses, repeats and reorders them, and compares with independent sums in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "server/round/fold.h"
#include "server/round/round_engine.h"

namespace thalweg::round_chaos_test {
namespace {

constexpr uint32_t kNodes = 5;
constexpr uint32_t kBuckets = 4;
constexpr uint32_t kChunks = 25;
constexpr uint64_t kRounds = 1000;  // kBuckets * kChunks * kRounds = 100 000 chunks
constexpr uint64_t kElems = 3;

// A LiveCount counts live payload buffers: a count above 0 at the end is a leak.
struct LiveCount {
  static inline int64_t live = 0;
  std::vector<float> values;
  explicit LiveCount(std::vector<float> v) : values(std::move(v)) { ++live; }
  ~LiveCount() { --live; }
};

// Returns a small integer, so that the sum over nodes is exact in both float and double.
float Value(const RoundId& id, uint32_t node, uint64_t elem) {
  const uint64_t mix =
      (id.bucket.index * 31 + id.chunk) * 7919 + id.round * 104729 + node * 13 + elem;
  return static_cast<float>(mix % 1000);
}

Contribution Make(const RoundId& id, uint32_t node) {
  std::vector<float> values;
  for (uint64_t e = 0; e < kElems; ++e) values.push_back(Value(id, node, e));
  const auto buffer = std::make_shared<LiveCount>(std::move(values));
  return {id, 1, WireFormat::kFloat32, kElems,
          Payload(std::as_bytes(std::span<const float>(buffer->values)), buffer)};
}

struct Packet {
  uint32_t node;
  RoundId id;
};

class RoundChaosTest : public ::testing::Test {
 protected:
  std::mt19937_64 rng_{20240607};
  RoundEngine engine_{
      {1, kNodes, kBuckets* kChunks, std::chrono::seconds(10), std::vector<uint32_t>(kNodes, 2)}};
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> completed_;
  uint64_t total_completed_ = 0;
  uint64_t duplicates_ = 0;

  bool Chance(int percent) { return static_cast<int>(rng_() % 100) < percent; }

  void Deliver(const Packet& packet) {
    auto added = engine_.Add(packet.node, Make(packet.id, packet.node), TimePoint{});
    ASSERT_TRUE(added.ok()) << added.status();
    if (added->verdict == RoundEngine::Verdict::kDuplicate ||
        added->verdict == RoundEngine::Verdict::kStale) {
      ++duplicates_;
    }
    if (added->verdict != RoundEngine::Verdict::kCompleted) return;
    CheckResult(*added->completed);
    ++completed_[{packet.id.bucket.index, packet.id.chunk}];
    ++total_completed_;
  }

  void CheckResult(const CompleteRound& round) {
    auto result = FoldRound(round, 1, nullptr);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->workers, 2 * kNodes);
    for (uint64_t e = 0; e < kElems; ++e) {
      double sum = 0;
      for (uint32_t node = 0; node < kNodes; ++node) sum += Value(round.id, node, e);
      float got;
      std::memcpy(&got, result->payload.pieces[0].data() + e * sizeof got, sizeof got);
      ASSERT_EQ(got, static_cast<float>(sum / kNodes)) << "wrong sum";
    }
  }
};

TEST_F(RoundChaosTest, LossDuplicationAndReorderingNeverMakeAWrongSumOrALeak) {
  std::vector<Packet> network;
  // Every node sends its share of the round each chunk is in; lost packets are sent again later.
  while (total_completed_ < uint64_t{kBuckets} * kChunks * kRounds) {
    for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        const uint64_t round = completed_[{bucket, chunk}] + 1;
        if (round > kRounds) continue;
        for (uint32_t node = 0; node < kNodes; ++node) {
          const Packet packet{node, {{bucket, 0}, chunk, round}};
          if (Chance(20)) continue;  // lost
          network.push_back(packet);
          if (Chance(10)) network.push_back(packet);  // duplicated
        }
      }
    }
    std::shuffle(network.begin(), network.end(), rng_);
    const size_t held_back = network.size() / 10;  // arrives in a later turn and may be stale
    while (network.size() > held_back) {
      ASSERT_NO_FATAL_FAILURE(Deliver(network.back()));
      network.pop_back();
    }
  }
  EXPECT_EQ(total_completed_, 100000u);
  EXPECT_GT(duplicates_, 10000u);
  EXPECT_EQ(engine_.open_rounds(), 0u);
  EXPECT_EQ(engine_.held_bytes(), 0u);
  EXPECT_EQ(LiveCount::live, 0);
}

}  // namespace
}  // namespace thalweg::round_chaos_test
