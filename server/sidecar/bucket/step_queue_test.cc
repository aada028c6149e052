#include "server/sidecar/bucket/step_queue.h"

#include <gtest/gtest.h>

namespace thalweg::step_queue_test {
namespace {

// A worker's gradients may lie in its own memory, which a step reads: it stays until then.
TEST(StepQueueTest, IsIdleOnceTheStepThatWasTakenIsDone) {
  const JobOutcome outcome{"job"};
  StepQueue steps(outcome);
  Part part({}, {}, WireFormat::kFloat32, kMinChunkBytes, 1);
  EXPECT_TRUE(steps.WaitUntilIdle(Now()));
  steps.AddFirst({nullptr, nullptr, &part});
  steps.NoteHere(part);
  EXPECT_TRUE(steps.WaitUntilIdle(Now()));
  ASSERT_TRUE(steps.Next().has_value());
  EXPECT_FALSE(steps.WaitUntilIdle(Now()));
  steps.NoteDone();
  EXPECT_TRUE(steps.WaitUntilIdle(Now()));
}

}  // namespace
}  // namespace thalweg::step_queue_test
