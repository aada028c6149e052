#include "server/sidecar/job/job_outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/thread.h"

namespace thalweg::job_outcome_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(JobOutcomeTest, FirstFailureIsTheReasonAndNamesTheJob) {
  JobOutcome outcome("resnet");
  EXPECT_TRUE(outcome.Check().ok());
  EXPECT_TRUE(outcome.Fail(absl::UnavailableError("shard 1 is gone")));
  EXPECT_FALSE(outcome.Fail(absl::InternalError("a consequence")));
  EXPECT_THAT(outcome.failure().message(),
              AllOf(HasSubstr("'resnet'"), HasSubstr("shard 1 is gone")));
  EXPECT_EQ(outcome.Check(), outcome.failure());
}

TEST(JobOutcomeTest, JobThatEndsInOrderHasNoFailureAndCannotFailLater) {
  JobOutcome outcome("resnet");
  outcome.End();
  EXPECT_FALSE(outcome.Fail(absl::InternalError("too late")));
  EXPECT_TRUE(outcome.failure().ok());
  EXPECT_TRUE(absl::IsCancelled(outcome.Check()));
}

TEST(JobOutcomeTest, WaitReturnsAtItsDeadlineOrWhenTheJobEnds) {
  JobOutcome outcome("resnet");
  EXPECT_FALSE(outcome.WaitForEnd(Now()));
  Thread waiting("waiting", [&] { EXPECT_TRUE(outcome.WaitForEnd(kUntilStopped)); });
  outcome.Fail(absl::InternalError("a fault"));
  waiting.Join();
}

}  // namespace
}  // namespace thalweg::job_outcome_test
