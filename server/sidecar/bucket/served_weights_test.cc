#include "server/sidecar/bucket/served_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::served_weights_unit_test {
namespace {

constexpr SnapshotId kId{0, 7};

class ServedWeightsTest : public BucketsFixture {
 protected:
  ServedWeightsTest() : BucketsFixture(HelloOf(0, 1), true) {}
};

TEST_F(ServedWeightsTest, WorkerHearsOfItsSidecarWhileShardsReadASnapshot) {
  std::atomic<int> heard = 0;
  shard_.snapshots.complete = {kId};
  shard_.on_snapshots = [&](const SnapshotCall& call) {
    while (call.action == SnapshotAction::kRestore && heard < 3) std::this_thread::yield();
  };
  ServedWeights weights(table_, shards_, std::chrono::milliseconds(8), kTestPatience);
  const auto answer = weights.Snapshots({SnapshotAction::kRestore, kId}, [&heard] { ++heard; });
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(shard_.snapshot_calls.back(), (SnapshotCall{SnapshotAction::kRestore, kId, kId}));
}

}  // namespace
}  // namespace thalweg::served_weights_unit_test
