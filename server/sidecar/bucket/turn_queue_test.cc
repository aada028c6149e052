#include "server/sidecar/bucket/turn_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/sidecar/bucket/step_queue.h"
#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::turn_queue_test {
namespace {

using Turn = TurnQueue::Turn;

constexpr TimePoint kStart{};
constexpr Duration kSecond = std::chrono::seconds(1);

class QueueTest : public BucketsFixture {
 protected:
  QueueTest() : BucketsFixture(HelloOf(0, 1)) {}

  void SetUp() override {
    BucketsFixture::SetUp();
    for (uint32_t index : {0u, 1u}) buckets_.push_back(Announce(table_, index, 10, 1).bucket);
  }
  Turn Submit(uint32_t index, bool may_run_at_once = false) {
    return *turns_.Submit(buckets_[index], 0, {buckets_[index]->id(), 1}, kStart, may_run_at_once);
  }

  JobOutcome outcome_{"job"};
  std::vector<std::shared_ptr<NodeBucket>> buckets_;
  TurnQueue turns_{outcome_};
  StepQueue steps_{outcome_};
};

TEST_F(QueueTest, BucketsTakeTurnsInTheOrderInWhichTheyBecomeReady) {
  EXPECT_EQ(Submit(1), Turn::kQueued);
  EXPECT_EQ(Submit(0), Turn::kQueued);
  for (const uint32_t index : {1u, 0u}) {
    EXPECT_EQ(turns_.Next(), buckets_[index]);
    turns_.EndTurn();
  }
}

TEST_F(QueueTest, BucketRunsAtOnceOnlyWhenNobodyHasOrWaitsForTheTurn) {
  EXPECT_EQ(Submit(0, true), Turn::kYours);
  EXPECT_EQ(Submit(1, true), Turn::kQueued);
  turns_.PutBack(buckets_[0]);
  turns_.EndTurn();
  EXPECT_EQ(turns_.Next(), buckets_[0]) << "what is put back comes first";
}

TEST_F(QueueTest, NobodyGetsATurnAfterTheJobsEnd) {
  Submit(0);
  outcome_.End();
  turns_.Wake();
  EXPECT_EQ(turns_.Next(), nullptr);
}

TEST_F(QueueTest, RoundsAreRefusedOnceAWorkerHasLeft) {
  turns_.NoteLeft("rank 6");
  turns_.NoteLeft("rank 7");
  const auto refused = turns_.Submit(buckets_[0], 0, {buckets_[0]->id(), 1}, kStart, false);
  EXPECT_EQ(refused.status().message(),
            "bucket 0 round 1 cannot complete: rank 6 has left the job");
}

TEST_F(QueueTest, TimeInFlightIsCountedOnceForRoundsThatOverlap) {
  Submit(0);
  Submit(1);
  EXPECT_EQ(turns_.EndRound(kStart + kSecond), Duration::zero());
  EXPECT_EQ(turns_.EndRound(kStart + 3 * kSecond), 3 * kSecond);
}

TEST_F(QueueTest, StepsAfterFirstPartsComeInTheOrderOfSendingAndBeforeLaterOnes) {
  const BucketLayout layout{DType::kFloat32, {{"w", {10}}}};
  std::vector<Part> parts;
  for (uint32_t number = 1; number <= 3; ++number) {
    parts.emplace_back(BucketId{0, 0, number}, layout, WireFormat::kFloat32, kMinChunkBytes, 1);
  }
  steps_.AddFirst({buckets_[0], nullptr, &parts[0]});
  steps_.AddFirst({buckets_[0], nullptr, &parts[1]});
  steps_.AddLater({buckets_[0], nullptr, &parts[2]}, false);
  for (const size_t here : {2, 1, 0}) steps_.NoteHere(parts[here]);
  for (const size_t expected : {0, 1, 2}) EXPECT_EQ(steps_.Next()->part, &parts[expected]);
  outcome_.End();
  EXPECT_FALSE(steps_.Next().has_value());
}

TEST_F(QueueTest, PartsThatOthersMayFollowKeepTheirOrderAmongLaterOnes) {
  const BucketLayout layout{DType::kFloat32, {{"w", {10}}}};
  std::vector<Part> parts;
  for (uint32_t number = 1; number <= 4; ++number) {
    parts.emplace_back(BucketId{0, 0, number}, layout, WireFormat::kFloat32, kMinChunkBytes, 1);
  }
  for (const size_t i : {0, 1, 2, 3}) {
    steps_.AddLater({buckets_[0], nullptr, &parts[i]}, i != 1);
  }
  for (const size_t here : {3, 2, 1}) steps_.NoteHere(parts[here]);
  EXPECT_EQ(steps_.Next()->part, &parts[1]);
  steps_.NoteHere(parts[0]);
  for (const size_t expected : {0, 2, 3}) EXPECT_EQ(steps_.Next()->part, &parts[expected]);
}

}  // namespace
}  // namespace thalweg::turn_queue_test
