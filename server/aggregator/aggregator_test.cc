#include "server/aggregator/aggregator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "core/base/testing/test_patience.h"
#include "server/plan/flow_plan.h"

namespace thalweg::aggregator_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A RecordingSink records what a node is told.
class RecordingSink : public ServedNode {
 public:
  void OnResult(RoundResult result) override {
    MutexLock lock(mutex_);
    results_.push_back(std::move(result));
    changed_.NotifyAll();
  }
  void OnFailed(absl::Status why) override {
    MutexLock lock(mutex_);
    failures_.push_back(std::move(why));
    changed_.NotifyAll();
  }
  uint32_t Backlog() const override { return backlog; }
  std::atomic<uint32_t> backlog{0};

  std::vector<RoundResult> WaitResults(size_t count) {
    MutexLock lock(mutex_);
    EXPECT_TRUE(changed_.WaitUntil(
        mutex_, Now() + kTestPatience,
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return results_.size() >= count; }));
    return results_;
  }
  absl::Status WaitFailure() {
    MutexLock lock(mutex_);
    const bool failed = changed_.WaitUntil(
        mutex_, Now() + kTestPatience,
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !failures_.empty(); });
    EXPECT_TRUE(failed);
    return failed ? failures_.front() : absl::OkStatus();
  }
  size_t num_failures() {
    MutexLock lock(mutex_);
    return failures_.size();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<RoundResult> results_;
  std::vector<absl::Status> failures_;
};

JoinRequest Request(uint32_t node, uint32_t num_nodes, const std::string& identity = "") {
  JoinRequest r;
  r.job = "job";
  r.identity = identity;
  r.node = node;
  r.node_name = absl::StrCat("host", node);
  r.workers = 1;
  r.num_nodes = num_nodes;
  r.world_size = num_nodes;
  r.num_shards = 1;
  r.chunk_bytes = kMinChunkBytes;
  r.round_timeout = kTestPatience;
  return r;
}

const BucketLayout kLayout{DType::kFloat32, {{"w", {2}}}};

Contribution Share(uint64_t round, std::vector<float> values) {
  const auto buffer = std::make_shared<std::vector<float>>(std::move(values));
  return {{{0, 0}, 0, round},
          1,
          WireFormat::kFloat32,
          buffer->size(),
          Payload(std::as_bytes(std::span<const float>(*buffer)), buffer)};
}

std::vector<float> Values(const RoundResult& result) {
  std::vector<float> values(result.elems);
  std::memcpy(values.data(), result.payload.pieces[0].data(), values.size() * sizeof(float));
  return values;
}

class AggregatorTest : public ::testing::Test {
 protected:
  using Edit = std::function<void(JoinRequest&)>;
  using MemberOr = absl::StatusOr<std::unique_ptr<Member>>;

  MemberOr Join(const JoinRequest& request, Duration patience = kTestPatience) {
    return aggregator_.Join(request, std::make_shared<RecordingSink>(), Now() + patience);
  }

  // Joins all nodes at once, as in a real job. `edit` may change a node's request.
  std::vector<MemberOr> JoinAll(uint32_t num_nodes, const Edit& edit = {},
                                Duration patience = kTestPatience) {
    std::vector<std::future<MemberOr>> joins;
    for (uint32_t node = 0; node < num_nodes; ++node) {
      JoinRequest request = Request(node, num_nodes);
      if (edit) edit(request);
      joins.push_back(std::async(std::launch::async, [this, request, patience] {
        return aggregator_.Join(request, std::make_shared<RecordingSink>(), Now() + patience);
      }));
    }
    std::vector<MemberOr> members;
    for (auto& join : joins) members.push_back(join.get());
    return members;
  }

  // Starts a job whose nodes have joined and registered kLayout.
  void StartJob(uint32_t num_nodes, const Edit& edit = {}) {
    members_.resize(num_nodes);
    for (uint32_t node = 0; node < num_nodes; ++node) {
      sinks_.push_back(std::make_shared<RecordingSink>());
      JoinRequest request = Request(node, num_nodes);
      if (edit) edit(request);
      aggregator_.BeginJoin(request, sinks_.back(), Now() + kTestPatience,
                            [this, node](MemberOr member) {
                              ASSERT_TRUE(member.ok()) << member.status();
                              members_[node] = *std::move(member);
                            });
    }
    for (const auto& member : members_) {
      ASSERT_TRUE(member->Register({{0, 0}, kLayout}, Now() + kTestPatience).ok());
    }
  }

  MetricRegistry registry_;
  Aggregator aggregator_{{}, registry_};
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<std::shared_ptr<RecordingSink>> sinks_;
};

TEST_F(AggregatorTest, SlowestLinkDecidesTheChunksOfAllNodesUnlessTheJobSaysSo) {
  const LinkSpeed slow{25e6, std::chrono::milliseconds(1)};
  const LinkSpeed fast{1e9, {}};
  const auto link = [&](JoinRequest& r) {
    r.link = r.node == 1 ? slow : fast;
    r.chunk_bytes = 0;
  };
  const FlowPlan expected = PlanFlow(slow, std::vector<uint32_t>{1}, DType::kFloat32);
  for (const auto& member : JoinAll(3, link)) {
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_EQ((*member)->terms().chunk_bytes, expected.chunk_bytes);
    EXPECT_EQ((*member)->terms().window_chunks, expected.window_chunks);
  }
  for (const auto& member : JoinAll(2, [&](JoinRequest& r) {
         link(r);
         r.chunk_bytes = 8192;
         r.window_chunks = 5;
       })) {
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_EQ((*member)->terms().chunk_bytes, 8192u);
    EXPECT_EQ((*member)->terms().window_chunks, 5u);
  }
}

TEST_F(AggregatorTest, AllNodesLearnTheSlowestLinkAndTheLargestCosts) {
  const auto edit = [](JoinRequest& r) {
    r.link = {1e9 / (1 + r.node % 2), std::chrono::milliseconds(r.node)};
    r.costs = {{1.0 * r.node, 2.0 - r.node, 5}, {0, 0, 1.0 + r.node}};
  };
  for (const auto& member : JoinAll(3, edit)) {
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_EQ((*member)->terms().link.bytes_per_second, 5e8);
    EXPECT_EQ((*member)->terms().link.round_trip, std::chrono::milliseconds(1));
    EXPECT_EQ((*member)->terms().costs, (std::vector<CodecCost>{{2, 2, 5}, {0, 0, 3}}));
  }
}

TEST_F(AggregatorTest, CostsOfOtherCodecsAreRefused) {
  const auto edit = [](JoinRequest& r) { r.costs.resize(r.node); };
  for (const auto& member : JoinAll(2, edit)) {
    EXPECT_EQ(member.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(member.status().message()),
                HasSubstr("the number of codecs with a cost is"));
  }
}

TEST_F(AggregatorTest, NodeThatDoesNotTakeItsResultsIsStoppedAtItsWindow) {
  StartJob(2, [](JoinRequest& r) { r.window_chunks = 3; });
  sinks_[1]->backlog = 3;
  EXPECT_TRUE(members_[0]->Contribute(Share(1, {1, 2})).ok());
  const absl::Status refused = members_[1]->Contribute(Share(1, {1, 2}));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("node 1"), HasSubstr("window")));
}

TEST_F(AggregatorTest, EveryNodeGetsTheSameMean) {
  StartJob(3);
  for (uint64_t round = 1; round <= 2; ++round) {
    for (uint32_t node : {2u, 0u, 1u}) {
      const float value = static_cast<float>(node * round);
      ASSERT_TRUE(members_[node]->Contribute(Share(round, {value, 3})).ok());
    }
    for (auto& sink : sinks_) {
      const RoundResult result = sink->WaitResults(round)[round - 1];
      EXPECT_EQ(Values(result), (std::vector<float>{static_cast<float>(round), 3}));
      EXPECT_EQ(result.workers, 3u);
      // All nodes share one buffer: it is encoded once and never copied.
      EXPECT_EQ(result.payload.owner, sinks_[0]->WaitResults(round)[round - 1].payload.owner);
    }
  }
}

TEST_F(AggregatorTest, MeanIsOverWorkersNotNodes) {
  StartJob(2, [](JoinRequest& r) {
    r.world_size = 4;
    r.workers = r.node == 0 ? 1 : 3;
  });
  ASSERT_TRUE(members_[0]->Contribute(Share(1, {4, 0})).ok());
  ASSERT_TRUE(members_[1]->Contribute(Share(1, {8, 0})).ok());
  EXPECT_EQ(Values(sinks_[0]->WaitResults(1)[0]), (std::vector<float>{7, 0}));
}

TEST_F(AggregatorTest, NonFiniteResultsAreCountedAndPassThrough) {
  StartJob(1);
  ASSERT_TRUE(members_[0]->Contribute(Share(1, {INFINITY, 1})).ok());
  EXPECT_EQ(sinks_[0]->WaitResults(1)[0].nonfinite_elems, 1u);
  EXPECT_EQ(Values(sinks_[0]->WaitResults(1)[0])[0], INFINITY);
  EXPECT_EQ(registry_.GetCounter("thalweg_shard_nonfinite_elements_total", "").Value(), 1);
}

TEST_F(AggregatorTest, NodeThatGivesUpJoiningFailsTheJobAtOnceAndFreesItsName) {
  std::vector<absl::Status> answers;
  const auto keep = [&](const MemberOr& member) { answers.push_back(member.status()); };
  const auto sink = std::make_shared<RecordingSink>();
  aggregator_.BeginJoin(Request(0, 3), sink, Now() + kTestPatience, keep);
  const auto give_up = aggregator_.BeginJoin(Request(1, 3), sink, Now() + kTestPatience, keep);
  EXPECT_TRUE(answers.empty());
  give_up(absl::UnavailableError("gave up"));
  ASSERT_EQ(answers.size(), 2u);
  for (const absl::Status& answer : answers) {
    EXPECT_EQ(answer, absl::UnavailableError("job 'job': node 1 (host1): gave up"));
  }
  EXPECT_EQ(aggregator_.num_jobs(), 0u);
  EXPECT_EQ(sink->num_failures(), 0u);  // the answers say it
}

TEST_F(AggregatorTest, NodeThatDoesNotComeIsNamedToAllWithinTheDeadline) {
  std::vector<std::promise<absl::Status>> answers(2);
  for (uint32_t node = 0; node < 2; ++node) {
    const Duration patience = node == 0 ? kTestPatience : std::chrono::milliseconds(50);
    aggregator_.BeginJoin(
        Request(node, 3), std::make_shared<RecordingSink>(), Now() + patience,
        [&answers, node](const MemberOr& member) { answers[node].set_value(member.status()); });
  }
  for (auto& answered : answers) {
    const absl::Status answer = answered.get_future().get();
    EXPECT_EQ(answer.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(answer.message()), AllOf(HasSubstr("'job'"), HasSubstr("node 2 of 3")));
  }
  EXPECT_EQ(aggregator_.num_jobs(), 0u);
}

TEST_F(AggregatorTest, DisagreementAboutTheJobFailsEveryNodeWithBothValues) {
  const auto members = JoinAll(2, [](JoinRequest& r) { r.world_size = 2 + r.node; });
  for (const auto& member : members) {
    EXPECT_EQ(member.status().code(), absl::StatusCode::kInvalidArgument) << member.status();
    EXPECT_THAT(std::string(member.status().message()),
                AllOf(HasSubstr("world size"), HasSubstr("host0"), HasSubstr("host1")));
  }
  EXPECT_EQ(aggregator_.num_jobs(), 0u);
}

TEST_F(AggregatorTest, WorkersThatDoNotAddUpAreRefused) {
  const auto members = JoinAll(2, [](JoinRequest& r) { r.world_size = 5; });
  for (const auto& member : members) {
    EXPECT_EQ(member.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(member.status().message()), HasSubstr("2 workers together"));
  }
}

TEST_F(AggregatorTest, SecondNodeWithTheSameNumberIsRefusedAndTheJobGoesOn) {
  StartJob(1);
  const auto second = Join(Request(0, 1));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(members_[0]->Contribute(Share(1, {1, 1})).ok());
  EXPECT_EQ(sinks_[0]->WaitResults(1).size(), 1u);
  EXPECT_EQ(sinks_[0]->num_failures(), 0u);
}

TEST_F(AggregatorTest, LateRoundFailsTheJobOnEveryNodeNamingWhoIsMissing) {
  StartJob(2, [](JoinRequest& r) { r.round_timeout = std::chrono::milliseconds(50); });
  ASSERT_TRUE(members_[0]->Contribute(Share(1, {1, 1})).ok());
  for (auto& sink : sinks_) {
    const absl::Status why = sink->WaitFailure();
    EXPECT_EQ(why.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(why.message()),
                AllOf(HasSubstr("'job'"), HasSubstr("bucket 0"), HasSubstr("round 1"),
                      HasSubstr("node 1 (host1)")));
    EXPECT_EQ(sink->num_failures(), 1u);
  }
}

TEST_F(AggregatorTest, LostNodeFailsTheJobAtOnceWithTheReason) {
  StartJob(2);
  members_[1]->Leave(absl::UnavailableError("the connection broke"));
  const absl::Status why = sinks_[0]->WaitFailure();
  EXPECT_THAT(std::string(why.message()),
              AllOf(HasSubstr("node 1 (host1)"), HasSubstr("the connection broke")));
  EXPECT_FALSE(members_[0]->Contribute(Share(1, {1, 1})).ok());
}

TEST_F(AggregatorTest, ReasonIsKeptAndToldInBoundedLength) {
  StartJob(2);
  members_[1]->Leave(absl::AbortedError(std::string(8 << 20, 'x')));
  const ShardReport report = aggregator_.Report(Now());
  ASSERT_EQ(report.jobs.size(), 1u);
  EXPECT_EQ(report.jobs[0].failure.size(), kMaxReasonBytes);
  EXPECT_EQ(members_[0]->Contribute(Share(1, {1, 1})).message().size(), kMaxReasonBytes);
}

TEST_F(AggregatorTest, NodeThatLeavesWhileARoundWaitsForItFailsTheRound) {
  StartJob(2);
  ASSERT_TRUE(members_[0]->Contribute(Share(1, {1, 1})).ok());
  members_[1]->Leave(absl::OkStatus());
  EXPECT_THAT(std::string(sinks_[0]->WaitFailure().message()),
              AllOf(HasSubstr("node 1 (host1) left"), HasSubstr("round 1 of bucket 0")));
}

TEST_F(AggregatorTest, OrderlyLeaveOfAllEndsTheJobWithoutFailure) {
  StartJob(2);
  for (uint32_t node : {0u, 1u}) {
    ASSERT_TRUE(members_[node]->Contribute(Share(1, {1, 1})).ok());
  }
  sinks_[0]->WaitResults(1);
  members_.clear();
  EXPECT_EQ(aggregator_.num_jobs(), 0u);
  for (auto& sink : sinks_) EXPECT_EQ(sink->num_failures(), 0u);
  // The job's name is free again.
  sinks_.clear();
  StartJob(2);
}

TEST_F(AggregatorTest, LayoutMismatchFailsTheJobNamingTensorAndNodes) {
  StartJob(2);
  ASSERT_TRUE(members_[0]->Register({{1, 0}, kLayout}, Now() + kTestPatience).ok());
  const BucketLayout other{DType::kFloat32, {{"v", {2}}}};
  EXPECT_EQ(members_[1]->Register({{1, 0}, other}, Now() + kTestPatience).code(),
            absl::StatusCode::kInvalidArgument);
  for (auto& sink : sinks_) {
    EXPECT_THAT(std::string(sink->WaitFailure().message()),
                AllOf(HasSubstr("'w'"), HasSubstr("'v'"), HasSubstr("host0"), HasSubstr("host1")));
  }
}

TEST_F(AggregatorTest, ContributionThatDoesNotFitTheLayoutFailsTheJob) {
  StartJob(1);
  EXPECT_EQ(members_[0]->Contribute(Share(1, {1, 2, 3})).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sinks_[0]->WaitFailure().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(AggregatorTest, JobsOfOneNameWithDifferentIdentitiesAreDifferentJobs) {
  std::vector<std::unique_ptr<Member>> members;
  for (const char* identity : {"", "a", "b"}) {
    // They would contradict each other if they were one job.
    const uint32_t num_nodes = 1 + static_cast<uint32_t>(members.size());
    for (auto& member :
         JoinAll(num_nodes, [&](JoinRequest& request) { request.identity = identity; })) {
      ASSERT_TRUE(member.ok()) << member.status();
      members.push_back(*std::move(member));
    }
  }
  const ShardReport report = aggregator_.Report(Now());
  ASSERT_EQ(report.jobs.size(), 3u);
  const char* const identities[] = {"", "61", "62"};  // in hexadecimal
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(report.jobs[i].name, "job");
    EXPECT_EQ(report.jobs[i].identity, identities[i]);
    EXPECT_EQ(report.jobs[i].state, JobReport::State::kRunning);
  }
  members.clear();
  EXPECT_EQ(aggregator_.num_jobs(), 0u);
}

TEST_F(AggregatorTest, NamesThatCannotBeShownAreRefusedAndShownEscaped) {
  const std::string forged = "a\n12:00:00.000 error: b";
  for (const bool is_job : {true, false}) {
    JoinRequest request = Request(0, 1);
    (is_job ? request.job : request.node_name) = forged;
    const absl::Status refused = Join(request).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr(is_job ? "job name 'a\\n12" : "node name 'a\\n12"),
                      HasSubstr("without control characters")));
  }
  const ShardReport report = aggregator_.Report(Now());
  EXPECT_TRUE(report.jobs.empty());
  ASSERT_EQ(report.faults.size(), 2u);
  EXPECT_EQ(report.faults[1].job, "a\\n12:00:00.000 error: b");
}

TEST_F(AggregatorTest, NumberOfJobsIsBounded) {
  JoinRequest request = Request(0, 1);
  std::vector<std::unique_ptr<Member>> members;
  const auto join = [&] {
    request.job = absl::StrCat("job ", members.size());
    return Join(request);
  };
  while (members.size() < 1024) {
    MemberOr member = join();
    ASSERT_TRUE(member.ok()) << member.status();
    members.push_back(*std::move(member));
  }
  const absl::Status full = join().status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("no room for 1 more"));
  members.pop_back();
  EXPECT_TRUE(join().ok());
}

TEST_F(AggregatorTest, NodesThatJobsClaimAreBoundedTogether) {
  std::vector<std::future<absl::Status>> joins;
  JoinRequest request = Request(0, 1024);
  for (size_t number = 0; number < 16; ++number) {
    request.job = absl::StrCat("job ", number);
    joins.push_back(
        std::async(std::launch::async, [this, request] { return Join(request).status(); }));
  }
  const TimePoint deadline = Now() + kTestPatience;
  while (aggregator_.num_jobs() < joins.size() && Now() < deadline) std::this_thread::yield();
  const absl::Status full = Join(Request(0, 1)).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()),
              AllOf(HasSubstr("jobs of 16384 nodes"), HasSubstr("no room for 1 more")));
  EXPECT_THAT(std::string(Join(Request(0, 1025)).status().message()),
              HasSubstr("expected 1 to 1024 nodes, got 1025"));
  aggregator_.Stop(absl::UnavailableError("shutting down"));
  for (auto& join : joins) EXPECT_EQ(join.get().code(), absl::StatusCode::kUnavailable);
}

TEST_F(AggregatorTest, MemberThatHasLeftIsRefused) {
  StartJob(1);
  members_[0]->Leave(absl::OkStatus());
  EXPECT_EQ(members_[0]->Contribute(Share(1, {1, 1})).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(members_[0]->Heartbeat(Now()).status().code(), absl::StatusCode::kNotFound);
  members_[0]->Leave(absl::AbortedError("again"));
  EXPECT_EQ(sinks_[0]->num_failures(), 0u);
}

TEST_F(AggregatorTest, DrainRefusesNewJobsAndWaitsForRunningOnes) {
  StartJob(1);
  EXPECT_FALSE(aggregator_.Drain(Now()));
  JoinRequest other = Request(0, 1);
  other.job = "other";
  EXPECT_EQ(Join(other).status().code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(members_[0]->Contribute(Share(1, {1, 1})).ok());
  members_[0]->Leave(absl::OkStatus());
  EXPECT_TRUE(aggregator_.Drain(Now() + kTestPatience));
}

TEST_F(AggregatorTest, DrainWaitsForNoJobThatHasNotBegun) {
  const auto sink = std::make_shared<RecordingSink>();
  const auto waits = [](const MemberOr& member) { EXPECT_FALSE(member.ok()); };
  aggregator_.BeginJoin(Request(0, 2), sink, Now() + kTestPatience, waits);
  EXPECT_TRUE(aggregator_.Drain(Now()));
  aggregator_.Stop(absl::UnavailableError("shutting down"));
}

TEST_F(AggregatorTest, DrainWaitsForNoJobThatHasFailed) {
  StartJob(2);
  EXPECT_FALSE(aggregator_.Drain(Now()));
  members_[1]->Leave(absl::UnavailableError("the connection broke"));
  EXPECT_TRUE(aggregator_.Drain(Now()));
}

TEST_F(AggregatorTest, StopTellsEveryNode) {
  StartJob(2);
  aggregator_.Stop(absl::UnavailableError("shutting down"));
  for (auto& sink : sinks_) {
    EXPECT_THAT(std::string(sink->WaitFailure().message()), HasSubstr("shutting down"));
  }
}

}  // namespace
}  // namespace thalweg::aggregator_test
