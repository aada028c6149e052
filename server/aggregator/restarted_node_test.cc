// These tests let a node whose process is new resume a job in which it has a seat.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "core/base/testing/test_patience.h"
#include "server/aggregator/aggregator.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::restarted_node_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class RestartedNodeTest : public ::testing::Test {
 protected:
  // What a node is told, and its member once it has joined.
  struct Life {
    std::shared_ptr<ListSink> sink = std::make_shared<ListSink>();
    absl::StatusOr<std::unique_ptr<Member>> member = absl::UnknownError("waits");
  };

  static JoinRequest Request(uint32_t node, const std::string& identity) {
    JoinRequest request = RequestOf(node, 2);
    request.identity = identity;
    request.round_timeout = kTestPatience;
    return request;
  }

  // Lets both nodes join a job of this identity and announce a bucket.
  void Start(const std::string& identity, const std::optional<UpdateRule>& update = {}) {
    identity_ = identity;
    for (uint32_t node = 0; node < 2; ++node) Join(Request(node, identity), lives_[node]);
    for (Life& life : lives_) {
      ASSERT_TRUE(life.member.ok()) << life.member.status();
      BucketAnnouncement bucket{{0, 0}, {DType::kFloat32, {{"w", {2}}}}};
      bucket.update = update;
      ASSERT_TRUE((*life.member)->Register(bucket, Now() + kTestPatience).ok());
    }
  }

  void Join(const JoinRequest& request, Life& life) {
    shard_.BeginJoin(request, life.sink, Now() + kTestPatience,
                     [&life](auto member) { life.member = std::move(member); });
  }
  // Lets a node do so as if it were new and had the result of `round`.
  void Resume(uint32_t node, uint64_t round, Life& life) {
    JoinRequest request = Request(node, identity_);
    request.chunk_bytes = (*lives_[0].member)->terms().chunk_bytes;
    request.window_chunks = (*lives_[0].member)->terms().window_chunks;
    request.resume = std::vector<BucketRounds>{{BucketId{}, {round}}};
    edit_(request);
    Join(request, life);
  }

  double Nodes() { return registry_.GetGauge("thalweg_shard_nodes", "").Value(); }

  void ExpectThatTheJobGoesOn() {
    for (Life& life : lives_) {
      EXPECT_TRUE((*life.member)->Heartbeat(Now() + kTestPatience).ok());
      EXPECT_THAT(life.sink->failures, IsEmpty());
    }
  }

  MetricRegistry registry_;
  Aggregator shard_{{}, registry_};
  std::string identity_;
  std::array<Life, 2> lives_;
  std::function<void(JoinRequest&)> edit_ = [](JoinRequest&) {};
};

TEST_F(RestartedNodeTest, AllNodesJoinAgainAndGoOn) {
  Start("key");
  std::array<Life, 2> next;
  Resume(1, 3, next[1]);
  for (Life& life : lives_) {
    ASSERT_THAT(life.sink->failures, SizeIs(1));
    EXPECT_TRUE(absl::IsNotFound(life.sink->failures[0])) << life.sink->failures[0];
    EXPECT_THAT(std::string(life.sink->failures[0].message()),
                HasSubstr("node 1 (host1) has been restarted"));
    EXPECT_TRUE(absl::IsNotFound((*life.member)->Heartbeat(Now() + kTestPatience).status()));
  }
  // Nodes of the earlier job do not count any more, whether or not their callers still live.
  EXPECT_EQ(Nodes(), 1);
  for (Life& life : lives_) (*life.member)->Leave(absl::OkStatus());
  EXPECT_EQ(Nodes(), 1);
  Resume(0, 4, next[0]);
  for (Life& life : next) {
    ASSERT_TRUE(life.member.ok()) << life.member.status();
    EXPECT_TRUE((*life.member)->terms().resumed);
    EXPECT_EQ((*life.member)->terms().epoch, (*lives_[0].member)->terms().epoch);
  }
  EXPECT_THAT((*next[0].member)->terms().wanted, SizeIs(1));  // the other one lacks round 4
  EXPECT_EQ(shard_.num_jobs(), 1u);
  EXPECT_THAT(shard_.Report(Now()).faults, IsEmpty());
}

TEST_F(RestartedNodeTest, NodeThatComesBackWhenTheJobHasFailedIsToldWhyUntilAnotherOneBegins) {
  Start("key");
  (*lives_[0].member)->Leave(absl::UnavailableError("rank 7 is gone"));
  std::array<Life, 3> next;
  for (const size_t jobs : {1, 0}) {  // the job is there as long as node 1 has its seat
    EXPECT_EQ(shard_.num_jobs(), jobs);
    Resume(1, 3, next[jobs]);
    EXPECT_TRUE(absl::IsAborted(next[jobs].member.status())) << next[jobs].member.status();
    EXPECT_THAT(std::string(next[jobs].member.status().message()), HasSubstr("rank 7 is gone"));
    if (jobs == 1) (*lives_[1].member)->Leave(absl::OkStatus());
  }
  Start("key");
  for (Life& life : lives_) (*life.member)->Leave(absl::OkStatus());
  Resume(1, 3, next[2]);
  EXPECT_EQ(shard_.num_jobs(), 1u);                       // which gathers
  shard_.Stop(absl::CancelledError("the test is over"));  // and is told so while `next` is there
}

TEST_F(RestartedNodeTest, NodeThatIsRestartedAgainWhileTheOthersAreAwaitedIsAwaitedNoMore) {
  Start("key");
  std::array<Life, 3> next;
  Resume(1, 3, next[1]);
  Resume(1, 3, next[2]);
  EXPECT_TRUE(absl::IsNotFound(next[1].member.status())) << next[1].member.status();
  Resume(0, 3, next[0]);
  EXPECT_TRUE(next[0].member.ok()) << next[0].member.status();
  EXPECT_TRUE(next[2].member.ok()) << next[2].member.status();
}

TEST_F(RestartedNodeTest, WithoutASecretTheSeatStaysTaken) {
  Start("");
  Life stranger;
  Resume(1, 0, stranger);
  EXPECT_TRUE(absl::IsInvalidArgument(stranger.member.status())) << stranger.member.status();
  ExpectThatTheJobGoesOn();
}

TEST_F(RestartedNodeTest, NodeThatContradictsTheJobIsRefusedAndTheJobGoesOn) {
  Start("key");
  edit_ = [](JoinRequest& request) { request.window_chunks += 1; };
  Life other;
  Resume(1, 0, other);
  EXPECT_TRUE(absl::IsInvalidArgument(other.member.status())) << other.member.status();
  ExpectThatTheJobGoesOn();
}

TEST_F(RestartedNodeTest, WeightsThatTheShardKeepsAreNotForgotten) {
  Start("key", UpdateRule{.groups = {0}});
  Life next;
  Resume(1, 0, next);
  EXPECT_TRUE(absl::IsFailedPrecondition(next.member.status())) << next.member.status();
  EXPECT_THAT(std::string(next.member.status().message()), HasSubstr("keeps weights of the job"));
  ExpectThatTheJobGoesOn();
}

TEST_F(RestartedNodeTest, JobThatGathersAgainNeedsNoMoreMemoryThanBefore) {
  Start("key");
  const uint64_t reserved = shard_.Report(Now()).memory_reserved_bytes;
  std::array<Life, 2> next;
  Resume(1, 3, next[1]);
  Resume(0, 3, next[0]);
  ASSERT_TRUE(next[0].member.ok()) << next[0].member.status();
  EXPECT_LT(shard_.Report(Now()).memory_reserved_bytes, reserved + (1 << 10));
}

}  // namespace
}  // namespace thalweg::restarted_node_test
