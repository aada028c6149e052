#include "server/aggregator/ended_jobs.h"

#include <gtest/gtest.h>

#include <string>

namespace thalweg::ended_jobs_test {
namespace {

const absl::Status kWhy = absl::UnavailableError("rank 7 is gone");

TEST(EndedJobsTest, ReasonIsKeptForAWhileForTheJobWithThatSecret) {
  EndedJobs ended;
  const TimePoint now = Now();
  ended.Note({"train", "secret"}, kWhy, now);
  EXPECT_EQ(ended.Check({"train", "secret"}, now + EndedJobs::kKept),
            absl::AbortedError("rank 7 is gone"));
  EXPECT_TRUE(ended.Check({"train", "other"}, now).ok());
  EXPECT_TRUE(
      ended.Check({"train", "secret"}, now + EndedJobs::kKept + std::chrono::seconds(1)).ok());
}

TEST(EndedJobsTest, JobThatEndedWellIsNotRemembered) {
  EndedJobs ended;
  ended.Note({"train", ""}, absl::OkStatus(), Now());
  EXPECT_TRUE(ended.Check({"train", ""}, Now()).ok());
}

TEST(EndedJobsTest, FirstOfTooManyIsForgotten) {
  EndedJobs ended;
  const TimePoint begin = Now();
  for (size_t i = 0; i <= EndedJobs::kMost; ++i) {
    ended.Note({std::to_string(i), ""}, kWhy, begin + std::chrono::milliseconds(i));
  }
  const TimePoint now = begin + std::chrono::seconds(1);
  EXPECT_TRUE(ended.Check({"0", ""}, now).ok());
  EXPECT_FALSE(ended.Check({"1", ""}, now).ok());
}

}  // namespace
}  // namespace thalweg::ended_jobs_test
