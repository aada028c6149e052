// These tests drive Job directly, because only Job takes the time as an argument.
#include <gtest/gtest.h>

#include <memory>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_seats_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A job of one node, which has joined at begin_.
class JobSeatsTest : public ::testing::Test {
 protected:
  JobSeatsTest() {
    EXPECT_TRUE(job_.AddMember(Request(), sink_, begin_).ok());
    EXPECT_TRUE(TermsOf(job_).ok());
  }

  static JoinRequest Request() {
    JoinRequest request;
    request.job = "job";
    request.node_name = "host0";
    request.workers = 1;
    request.num_nodes = 1;
    request.world_size = 1;
    request.num_shards = 1;
    request.round_timeout = seconds(30);
    return request;
  }

  std::shared_ptr<ListSink> sink_ = std::make_shared<ListSink>();
  MetricRegistry registry_;
  ShardMetrics metrics_{registry_};
  MemoryBudget memory_{TestJob::kPlenty, metrics_.memory_reserved_bytes};
  FaultLog faults_;
  Job job_{Request(), 8, memory_, metrics_, faults_};
  const TimePoint begin_ = Now();
};

TEST_F(JobSeatsTest, NodeNotHeardOfForALeaseIsLost) {
  ASSERT_TRUE(job_.Heartbeat(0, begin_ + seconds(1)).ok());
  job_.Tick(begin_ + seconds(1) + kLease);
  EXPECT_TRUE(sink_->failures.empty());
  job_.Tick(begin_ + seconds(1) + kLease + milliseconds(1));
  ASSERT_EQ(sink_->failures.size(), 1u);
  EXPECT_EQ(sink_->failures[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sink_->failures[0].message(), "job 'job': node 0 (host0) has sent nothing for 15 s");
}

}  // namespace
}  // namespace thalweg::job_seats_test
