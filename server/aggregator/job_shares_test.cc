// These tests check how the nodes of a job agree on the shares of its shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/testing/test_patience.h"
#include "server/aggregator/aggregator.h"
#include "server/aggregator/job_test_util.h"
#include "server/plan/flow_plan.h"

namespace thalweg::job_shares_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class JobSharesTest : public ::testing::Test {
 protected:
  using Edit = std::function<void(JoinRequest&)>;
  using MemberOr = absl::StatusOr<std::unique_ptr<Member>>;

  // Returns the request of a node to the first of `num_shards` shards.
  JoinRequest Request(uint32_t node, uint32_t num_shards) const {
    JoinRequest request;
    request.job = "job";
    request.node = node;
    request.node_name = absl::StrCat("host", node);
    request.workers = 1;
    request.num_nodes = num_nodes_;
    request.world_size = num_nodes_;
    request.num_shards = num_shards;
    request.round_timeout = kTestPatience;
    return request;
  }

  // Joins all nodes at once.
  std::vector<MemberOr> JoinAll(uint32_t num_shards, const Edit& edit) {
    std::vector<std::future<MemberOr>> joins;
    for (uint32_t node = 0; node < num_nodes_; ++node) {
      JoinRequest request = Request(node, num_shards);
      edit(request);
      joins.push_back(std::async(std::launch::async, [this, request] {
        return aggregator_.Join(request, std::make_shared<ListSink>(), Now() + kTestPatience);
      }));
    }
    std::vector<MemberOr> members;
    for (auto& join : joins) members.push_back(join.get());
    return members;
  }

  uint32_t num_nodes_ = 3;
  MetricRegistry registry_;
  Aggregator aggregator_{{}, registry_};
};

TEST_F(JobSharesTest, AllNodesGetTheSharesThatFitWhatTheyHaveMeasured) {
  const auto members = JoinAll(4, [](JoinRequest& r) {
    r.hosts = {0, 1, 2, kNoHost};
    r.shard_rates.assign(4, 0);
    r.shard_rates[(r.node + 1) % 3] = 1e8;
    if (r.node == 2) r.shard_rates[3] = 1e8;
  });
  // Three equal hosts and one more: x each and y satisfy 1 + x = 3 y and 3 x + y = 1.
  const double seconds = 1.2 / 1e8;
  for (const auto& member : members) {
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_EQ((*member)->terms().weight, 0u);
    EXPECT_THAT((*member)->terms().shares, ElementsAre(kShareTotal / 5, kShareTotal / 5,
                                                       kShareTotal / 5, 2 * (kShareTotal / 5)));
    EXPECT_NEAR((*member)->terms().forecast.seconds_per_byte, seconds, 1e-9 * seconds);
    EXPECT_NEAR((*member)->terms().forecast.load, 1.2, 1e-9);
  }
}

TEST_F(JobSharesTest, WithoutMeasurementsSharesAreEqual) {
  for (const auto& member : JoinAll(2, [](JoinRequest&) {})) {
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_THAT((*member)->terms().shares, Each(kShareTotal / 2));
    EXPECT_EQ((*member)->terms().forecast, ShareForecast());
  }
}

TEST_F(JobSharesTest, OtherShardsLeaveTheSharesToTheFirst) {
  for (const auto& member : JoinAll(2, [](JoinRequest& r) { r.shard = 1; })) {
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_THAT((*member)->terms().shares, IsEmpty());
  }
}

TEST_F(JobSharesTest, FirstShardReportsWhatItHasChosen) {
  const auto members = JoinAll(1, [](JoinRequest& r) { r.shard_rates = {1e8}; });
  const auto jobs = aggregator_.Report(Now()).jobs;
  ASSERT_THAT(jobs, SizeIs(1));
  ASSERT_TRUE(jobs[0].placement);
  EXPECT_EQ(jobs[0].placement->shares, (*members[0])->terms().shares);
  EXPECT_EQ(jobs[0].placement->forecast, (*members[0])->terms().forecast);
  EXPECT_EQ(jobs[0].placement->forecast.advice, Advice::kLocalShards);
  EXPECT_THAT(jobs[0].placement->text, HasSubstr("100 MB take 3 s, 2.25 times as long as in a"));
}

TEST_F(JobSharesTest, ShardsWhoseChoiceDoesNotCountReportNone) {
  const auto members = JoinAll(2, [](JoinRequest& r) { r.shard = 1; });
  EXPECT_FALSE(aggregator_.Report(Now()).jobs[0].placement);

  num_nodes_ = 1;
  MetricRegistry registry;
  Aggregator weighted({.weight = 3}, registry);
  const auto member =
      weighted.Join(Request(0, 1), std::make_shared<ListSink>(), Now() + kTestPatience);
  ASSERT_TRUE(member.ok()) << member.status();
  EXPECT_FALSE(weighted.Report(Now()).jobs[0].placement);
}

TEST_F(JobSharesTest, WindowIsForTheShares) {
  const LinkSpeed link{125e6, {}};
  const auto members = JoinAll(3, [&](JoinRequest& r) {
    r.link = link;
    r.hosts = {0, 1, 2};
    r.shard_rates.assign(3, 0);
    // Node 1 is slow, so that its shard sums nothing.
    r.shard_rates[(r.node + 1) % 3] = r.node == 2 ? 125e6 : 12.5e6;
  });
  for (const auto& member : members) {
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_EQ((*member)->terms().shares[1], 0u);
    EXPECT_EQ((*member)->terms().window_chunks,
              PlanFlow(link, (*member)->terms().shares, DType::kFloat32).window_chunks);
    const std::vector<uint32_t> equal(3, 1);
    EXPECT_NE((*member)->terms().window_chunks,
              PlanFlow(link, equal, DType::kFloat32).window_chunks);
  }
}

TEST_F(JobSharesTest, DisagreementAboutHostsIsRefusedNamingBothNodes) {
  num_nodes_ = 2;
  const auto members = JoinAll(2, [](JoinRequest& r) { r.hosts = {r.node, kNoHost}; });
  for (const auto& member : members) {
    EXPECT_EQ(member.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(member.status().message()),
                AllOf(HasSubstr("node 0 (host0) says"), HasSubstr("'0, none'"),
                      HasSubstr("node 1 (host1) says"), HasSubstr("'1, none'"),
                      HasSubstr("the list of nodes that host the shards is")));
  }
}

TEST_F(JobSharesTest, NoHostsAreTheSameAsNone) {
  const auto members = JoinAll(2, [](JoinRequest& r) {
    if (r.node == 1) r.hosts.assign(2, kNoHost);
  });
  for (const auto& member : members) EXPECT_TRUE(member.ok()) << member.status();
}

TEST_F(JobSharesTest, ShardsThatCannotBeAreRefused) {
  const auto refusal = [&](const Edit& edit) {
    JoinRequest request = Request(1, 2);
    edit(request);
    const absl::Status status =
        aggregator_.Join(request, std::make_shared<ListSink>(), Now() + kTestPatience).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](JoinRequest& r) { r.num_shards = kMaxShards + 1; }),
              HasSubstr("expected at most 8192 shards, got 8193"));
  EXPECT_THAT(refusal([](JoinRequest& r) { r.hosts = {0, 1, 2}; }),
              HasSubstr("names the hosts of 3 shards of 2"));
  EXPECT_THAT(refusal([](JoinRequest& r) { r.shard_rates = {1}; }),
              HasSubstr("has rates of 1 shards of 2"));
  EXPECT_THAT(refusal([](JoinRequest& r) { r.hosts = {0, 3}; }),
              HasSubstr("a shard is said to be on node 3 of 3"));
  EXPECT_THAT(refusal([](JoinRequest& r) { r.hosts = {2, 2}; }),
              HasSubstr("two shards are said to be on node 2"));
  EXPECT_EQ(aggregator_.num_jobs(), 0u);
}

}  // namespace
}  // namespace thalweg::job_shares_test
