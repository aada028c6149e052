// These tests cover who may join a shard that hosts jobs, and what the log says of jobs that
// anybody may join.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "core/base/testing/test_patience.h"
#include "core/base/thread.h"
#include "server/aggregator/aggregator.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::hosting_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

JoinRequest Request(const std::string& job, const std::string& identity, uint32_t node = 0,
                    uint32_t num_nodes = 1) {
  JoinRequest request;
  request.job = job;
  request.identity = identity;
  request.node = node;
  request.num_nodes = num_nodes;
  request.workers = 1;
  request.world_size = num_nodes;
  request.num_shards = 1;
  request.round_timeout = kTestPatience;
  return request;
}

class HostingTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request) {
    return shard_.Join(request, sink_, Now() + kTestPatience);
  }
  void ExpectRefused(const JoinRequest& request) {
    const size_t jobs_before = shard_.num_jobs();
    const absl::Status status = Join(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("does not host"), HasSubstr("'" + request.job + "'")));
    EXPECT_EQ(shard_.num_jobs(), jobs_before);
  }

  MetricRegistry registry_;
  Aggregator shard_{{.hosted_only = true}, registry_};
  std::shared_ptr<ListSink> sink_ = std::make_shared<ListSink>();
};

TEST_F(HostingTest, NodesOfAnInvitedJobMayJoinAndNobodyElse) {
  ExpectRefused(Request("job", "id"));
  const auto hosting = shard_.Host("job", "id");
  EXPECT_TRUE(Join(Request("job", "id")).ok());
  ExpectRefused(Request("job", "other"));
  ExpectRefused(Request("job", ""));
  ExpectRefused(Request("other", "id"));
  const ShardReport report = shard_.Report(Now());
  ASSERT_EQ(report.reasons.size(), 1u);
  EXPECT_EQ(report.reasons[0].nodes_refused, 4u);
}

TEST_F(HostingTest, JobGoesOnWhenItsHostingHasEndedAndTakesNobodyIn) {
  auto hosting = shard_.Host("job", "id");
  const auto member = Join(Request("job", "id"));
  ASSERT_TRUE(member.ok()) << member.status();
  hosting.reset();
  ExpectRefused(Request("job", "id"));
  const BucketLayout layout{DType::kFloat32, {{"w", {1}}}};
  ASSERT_TRUE((*member)->Register({{0, 0}, layout}, Now() + kTestPatience).ok());
  const auto value = std::make_shared<float>(3.5f);
  const Payload payload(std::as_bytes(std::span(value.get(), 1)), value);
  const uint64_t epoch = (*member)->terms().epoch;
  ASSERT_TRUE(
      (*member)->Contribute({{{0, 0}, 0, 1}, epoch, WireFormat::kFloat32, 1, payload}).ok());
  EXPECT_EQ(sink_->results.size(), 1u);
  EXPECT_TRUE(sink_->failures.empty());
}

TEST_F(HostingTest, NodesThatWaitForOthersAreToldWhenTheHostingHasEnded) {
  auto hosting = shard_.Host("job", "id");
  absl::Status waited;
  {
    const Thread node("node", [&] { waited = Join(Request("job", "id", 0, 2)).status(); });
    while (shard_.num_jobs() == 0) std::this_thread::yield();
    hosting.reset();
  }
  EXPECT_EQ(waited.code(), absl::StatusCode::kAborted) << waited;
  EXPECT_THAT(std::string(waited.message()), HasSubstr("are gone"));
}

TEST_F(HostingTest, JobIsHostedUntilTheLastOfItsHostingsEnds) {
  auto first = shard_.Host("job", "id");
  auto second = shard_.Host("job", "id");
  const auto other = shard_.Host("other", "id");
  first.reset();
  EXPECT_TRUE(Join(Request("job", "id")).ok());
  second.reset();
  ExpectRefused(Request("job", "id"));
  EXPECT_TRUE(Join(Request("other", "id")).ok());
}

class JobLogTest : public ::testing::Test {
 protected:
  JobLogTest() {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)));
  }
  ~JobLogTest() override { spdlog::set_default_logger(std::move(before_)); }

  // Runs a job of `num_nodes` nodes and returns what is logged meanwhile.
  std::string LogOf(const std::string& identity, uint32_t num_nodes) {
    text_.str("");
    {
      std::vector<Thread> nodes;
      for (uint32_t node = 0; node < num_nodes; ++node) {
        nodes.emplace_back("node", [this, identity, node, num_nodes] {
          const auto member = shard_.Join(Request("bert", identity, node, num_nodes),
                                          std::make_shared<ListSink>(), Now() + kTestPatience);
          ASSERT_TRUE(member.ok()) << member.status();
        });
      }
    }
    return text_.str();
  }

  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream text_;
  MetricRegistry registry_;
  Aggregator shard_{{}, registry_};
};

TEST_F(JobLogTest, JobThatAnybodyMayJoinIsLoggedOnce) {
  const std::string log = LogOf("", 3);
  EXPECT_THAT(log, HasSubstr("job 'bert' has no secret"));
  EXPECT_EQ(log.find("no secret"), log.rfind("no secret")) << log;
}

TEST_F(JobLogTest, JobThatNobodyElseCanJoinIsNotLogged) {
  EXPECT_EQ(LogOf("id", 3), "");
  EXPECT_EQ(LogOf("", 1), "");
}

}  // namespace
}  // namespace thalweg::hosting_test
