// This test sends one-shot rounds of two groups through one engine, while the simulated network
// repeats and reorders contributions.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "server/round/round_engine.h"
#include "server/round/round_test_util.h"

namespace thalweg::one_shot_chaos_test {
namespace {

constexpr uint32_t kNodes = 5;
constexpr uint32_t kWindow = 4;
constexpr uint64_t kRounds = 5000;  // of each group
const std::vector<std::vector<uint32_t>> kGroups = {{0, 1, 2, 3, 4}, {1, 3}};

// What a node knows of a group.
struct Progress {
  uint64_t sent = 0;
  std::vector<bool> has = std::vector<bool>(kRounds + 1);  // by sequence number
  uint64_t settled = 0;
};

struct Packet {
  uint32_t node;
  Contribution contribution;
};

class OneShotChaosTest : public ::testing::Test {
 protected:
  OneShotChaosTest() { EXPECT_TRUE(engine_.SetGroup({1, {{1, 1}, {3, 1}}, kWindow}).ok()); }

  // Sends the node's next contributions to the group, as far as its window lets it.
  void Send(uint32_t node, uint32_t group) {
    Progress& progress = progress_[{node, group}];
    while (progress.sent < kRounds && progress.sent - progress.settled < kWindow) {
      Contribution share = ShareOf({OneShotsOf(group), 0, ++progress.sent}, kMeanOfAll, 1, group);
      share.settled = progress.settled;
      for (uint64_t copies = 1 + random_() % 2; copies > 0; --copies) {
        network_.push_back({node, share});
      }
    }
  }

  void Deliver(const Packet& packet) {
    const auto added = engine_.Add(packet.node, packet.contribution, TimePoint{});
    ASSERT_TRUE(added.ok()) << added.status();
    if (!added->completed) return;
    ++completed_;
    const auto& [bucket, chunk, sequence] = added->completed->id;
    ASSERT_EQ(added->completed->nodes, kGroups[bucket.generation]);
    for (const uint32_t node : kGroups[bucket.generation]) {
      Progress& progress = progress_[{node, bucket.generation}];
      ASSERT_FALSE(progress.has[sequence]) << ToString(added->completed->id) << " completed twice";
      progress.has[sequence] = true;
      while (progress.settled < kRounds && progress.has[progress.settled + 1]) ++progress.settled;
    }
  }

  std::mt19937_64 random_{20261124};
  RoundEngine engine_{{1, kNodes, kWindow, std::chrono::seconds(10)}};
  std::map<std::pair<uint32_t, uint32_t>, Progress> progress_;  // by node and group
  std::vector<Packet> network_;
  uint64_t completed_ = 0;
};

TEST_F(OneShotChaosTest, RoundsCompleteOnceAndLeaveNothingUnderRepetitionAndReordering) {
  while (completed_ < kGroups.size() * kRounds) {
    for (uint32_t group = 0; group < kGroups.size(); ++group) {
      for (const uint32_t node : kGroups[group]) Send(node, group);
    }
    ASSERT_FALSE(network_.empty());
    std::shuffle(network_.begin(), network_.end(), random_);
    const size_t held_back = network_.size() / 4;  // may arrive after its round is settled
    while (network_.size() > held_back) {
      ASSERT_NO_FATAL_FAILURE(Deliver(network_.back()));
      network_.pop_back();
    }
    // A node is at most a window of rounds behind what it says that it has settled.
    ASSERT_LE(engine_.unsettled_runs(), 2 * kGroups.size() * kWindow);
  }
  EXPECT_EQ(engine_.open_rounds(), 0u);
  EXPECT_EQ(engine_.held_bytes(), 0u);
}

}  // namespace
}  // namespace thalweg::one_shot_chaos_test
