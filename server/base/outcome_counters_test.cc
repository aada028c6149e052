#include "server/base/outcome_counters.h"

#include <gtest/gtest.h>

namespace thalweg::outcome_counters_test {
namespace {

class OutcomeCountersTest : public ::testing::Test {
 protected:
  double Value(const char* outcome) {
    return registry_.GetCounter("ended_total", "", {{"outcome", outcome}}).Value();
  }

  MetricRegistry registry_;
  OutcomeCounters counters_{registry_, "ended_total", "Help"};
};

TEST_F(OutcomeCountersTest, EveryCodeIsThereFromTheBeginning) {
  EXPECT_EQ(registry_.Snapshot().at(0).samples.size(), 17u);  // absl's codes, OK included
}

TEST_F(OutcomeCountersTest, CodeIsTheLabel) {
  counters_.Add(absl::StatusCode::kOk);
  counters_.Add(absl::StatusCode::kDeadlineExceeded, 5);
  counters_.Add(absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Value("ok"), 1);
  EXPECT_EQ(Value("deadline_exceeded"), 5);
  EXPECT_EQ(Value("unauthenticated"), 1);
}

TEST_F(OutcomeCountersTest, CodeThatDoesNotExistIsUnknown) {
  counters_.Add(static_cast<absl::StatusCode>(99));
  counters_.Add(static_cast<absl::StatusCode>(-1));
  EXPECT_EQ(Value("unknown"), 2);
}

}  // namespace
}  // namespace thalweg::outcome_counters_test
