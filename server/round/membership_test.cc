#include "server/round/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace thalweg::membership_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr TimePoint kStart{};
constexpr Duration kMoment = milliseconds(1);

JoinRequest Request(uint32_t node, uint32_t num_nodes, uint32_t workers = 2) {
  JoinRequest request;
  request.job = "job";
  request.node = node;
  request.node_name = absl::StrCat("host", node);
  request.workers = workers;
  request.num_nodes = num_nodes;
  request.world_size = 2 * num_nodes;
  return request;
}

// A job that all its nodes have joined at kStart.
Members Begun(uint32_t num_nodes) {
  Members members(Request(0, num_nodes));
  for (uint32_t node = 0; node < num_nodes; ++node) members.Join(Request(node, num_nodes), kStart);
  members.Begin(kStart);
  return members;
}

std::vector<uint32_t> NodesOf(const std::vector<Members::Finding>& findings) {
  std::vector<uint32_t> nodes;
  for (const Members::Finding& finding : findings) nodes.push_back(finding.node);
  return nodes;
}

TEST(MembersTest, JobIsCompleteWhenEveryNodeHasJoined) {
  Members members(Request(0, 3));
  EXPECT_TRUE(members.IsEmpty());
  EXPECT_EQ(members.Missing(), "nodes 0, 1, 2 of 3");
  members.Join(Request(2, 3), kStart);
  members.Join(Request(0, 3), kStart);
  EXPECT_FALSE(members.IsComplete());
  EXPECT_FALSE(members.IsEmpty());
  EXPECT_EQ(members.Missing(), "node 1 of 3");
  EXPECT_EQ(members.CheckActive(0), absl::FailedPreconditionError("the job is not complete yet"));
  members.Join(Request(1, 3), kStart);
  EXPECT_TRUE(members.IsComplete());
  EXPECT_TRUE(members.CheckActive(0).ok());
  EXPECT_EQ(members.epoch(), 1u);
  EXPECT_EQ(members.Names({0, 2}), "node 0 (host0), node 2 (host2)");
}

TEST(MembersTest, TakenSeatIsRefusedNamingBothEvenWhenItsNodeHasLeft) {
  Members members(Request(0, 2));
  EXPECT_TRUE(members.CheckSeat(Request(0, 2)).ok());
  members.Join(Request(0, 2), kStart);
  JoinRequest newcomer = Request(0, 2);
  newcomer.node_name = "other";
  const absl::Status taken = absl::AlreadyExistsError(
      "job 'job' has a node 0 already: node 0 (host0); the newcomer is other");
  EXPECT_EQ(members.CheckSeat(newcomer), taken);
  EXPECT_TRUE(members.Leave(0));
  EXPECT_EQ(members.CheckSeat(newcomer), taken);
}

TEST(MembersTest, WorkersAreAddedUpWhenTheLastNodeJoins) {
  Members members(Request(0, 2));
  EXPECT_TRUE(members.CheckWorkers(Request(0, 2, 3)).ok());
  members.Join(Request(0, 2, 3), kStart);
  EXPECT_TRUE(members.CheckWorkers(Request(1, 2, 1)).ok());
  EXPECT_EQ(
      members.CheckWorkers(Request(1, 2, 2)),
      absl::InvalidArgumentError("its nodes have 5 workers together, but the world size is 4"));
}

TEST(MembersTest, LeasesBeginWithTheJob) {
  Members members(Request(0, 2));
  members.Join(Request(0, 2), kStart);
  EXPECT_THAT(members.Silent(kStart + 2 * kLease), IsEmpty());  // it waits for node 1
  const TimePoint begin = kStart + seconds(100);
  members.Join(Request(1, 2), begin);
  members.Begin(begin);
  EXPECT_THAT(members.Silent(begin + kLease), IsEmpty());
  EXPECT_THAT(NodesOf(members.Silent(begin + kLease + kMoment)), ElementsAre(0, 1));
}

TEST(MembersTest, JobIsInUseOnceItHasBegunAndANodeSpeaks) {
  Members members(Request(0, 2));
  members.Join(Request(0, 2), kStart);
  EXPECT_FALSE(members.IsInUse(kStart));  // it waits for node 1
  members.Join(Request(1, 2), kStart);
  members.Begin(kStart);
  const TimePoint late = kStart + 3 * kHeartbeatInterval;
  EXPECT_TRUE(members.IsInUse(kStart + kHeartbeatInterval));
  EXPECT_FALSE(members.IsInUse(late));
  members.Hear(1, kStart + kMoment);
  EXPECT_TRUE(members.IsInUse(late));
  EXPECT_TRUE(members.Leave(1));
  EXPECT_FALSE(members.IsInUse(late));
}

TEST(MembersTest, NodeSilentForMoreThanALeaseIsNamed) {
  Members members = Begun(3);
  members.Hear(0, kStart + seconds(1));
  members.Hear(2, kStart + seconds(1));
  const auto silent = members.Silent(kStart + kLease + kMoment);
  ASSERT_THAT(NodesOf(silent), ElementsAre(1));
  EXPECT_EQ(silent[0].why, absl::UnavailableError("node 1 (host1) has sent nothing for 15 s"));
  EXPECT_TRUE(members.Leave(1));
  EXPECT_THAT(members.Silent(kStart + kLease + kMoment), IsEmpty());
}

TEST(MembersTest, LeaseCoversTheTimeForWhichAConnectionMayBeAway) {
  Members members(Request(0, 2));
  JoinRequest patient = Request(0, 2);
  patient.grace = seconds(60);
  members.Join(patient, kStart);
  members.Join(Request(1, 2), kStart);
  members.Begin(kStart);
  // Its last heartbeat came an interval before the break; the next one, an interval after the
  // connection is there again.
  const TimePoint heard = kStart + kHeartbeatInterval + seconds(60) + kHeartbeatInterval;
  EXPECT_THAT(NodesOf(members.Silent(heard)), ElementsAre(1));
  const auto silent = members.Silent(kStart + LeaseFor(seconds(60), 1) + kMoment);
  ASSERT_THAT(NodesOf(silent), ElementsAre(0, 1));
  EXPECT_EQ(silent[0].why, absl::UnavailableError("node 0 (host0) has sent nothing for 66.4 s"));
}

TEST(MembersTest, JobOfManyShardsHasHeartbeatsLessOftenAndLongerLeases) {
  EXPECT_EQ(HeartbeatInterval(1), seconds(2));
  EXPECT_EQ(HeartbeatInterval(32), seconds(2));
  EXPECT_EQ(HeartbeatInterval(48), seconds(3));
  EXPECT_EQ(HeartbeatInterval(4096), seconds(4));
  JoinRequest request = Request(0, 1);
  request.num_shards = 64;
  request.grace = seconds(10);
  Members members(request);
  members.Join(request, kStart);
  members.Begin(kStart);
  // As above, with a connection that takes 2.4 s.
  const TimePoint heard = kStart + seconds(4) + seconds(10) + milliseconds(2400) + seconds(4);
  EXPECT_THAT(members.Silent(heard), IsEmpty());
  EXPECT_THAT(NodesOf(members.Silent(heard + kMoment)), ElementsAre(0));
  EXPECT_TRUE(members.IsInUse(kStart + 2 * seconds(4)));
  EXPECT_FALSE(members.IsInUse(kStart + 2 * seconds(4) + kMoment));
}

TEST(MembersTest, GroupCannotHaveMoreWorkersOfANodeThanThereAre) {
  const Members members = Begun(2);
  EXPECT_TRUE(members.CheckGroup({1, {{0, 1}, {1, 2}}}).ok());
  const absl::Status refused = members.CheckGroup({1, {{1, 3}}});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("node 1 (host1) has 2 workers"));
}

TEST(MembersTest, NodeThatHasLeftIsStillNeeded) {
  Members members = Begun(2);
  EXPECT_TRUE(members.CheckNoneLeft().ok());
  EXPECT_TRUE(members.Leave(1));
  EXPECT_FALSE(members.Leave(1));
  EXPECT_EQ(members.CheckActive(1), absl::NotFoundError("this node has left the job"));
  EXPECT_TRUE(members.CheckActive(0).ok());
  EXPECT_EQ(members.CheckNoneLeft(), absl::AbortedError("node 1 (host1) has left the job"));
  EXPECT_EQ(members.epoch(), 1u);
  EXPECT_FALSE(members.IsEmpty());
  EXPECT_TRUE(members.Leave(0));
  EXPECT_TRUE(members.IsEmpty());
}

TEST(MembersTest, NodeThatHasNotJoinedCannotLeave) {
  Members members(Request(0, 2));
  EXPECT_FALSE(members.Leave(0));
}

TEST(MembersTest, LeavingNodeIsToBlameUnlessItKnowsWhyTheJobHasFailed) {
  const Members members = Begun(2);
  EXPECT_EQ(members.Blame(1, absl::UnavailableError("rank 3 has died")),
            absl::UnavailableError("node 1 (host1): rank 3 has died"));
  EXPECT_EQ(members.Blame(1, absl::UnavailableError("job 'job': rank 0 has died")),
            absl::UnavailableError("job 'job': rank 0 has died"));
  EXPECT_EQ(members.Blame(1, absl::NotFoundError("no such bucket")),
            absl::AbortedError("node 1 (host1): no such bucket"));
}

TEST(MembersTest, LostNodeIsNoLongerNeededAndRaisesTheEpoch) {
  Members members = Begun(3);
  const Members::Change change = members.SetLost(1, "node 1 (host1) has sent nothing for 15 s");
  EXPECT_EQ(change.epoch, 2u);
  EXPECT_THAT(change.active, ElementsAre(0, 2));
  EXPECT_EQ(change.why, "epoch 2 has 2 of 3 nodes: node 1 (host1) has sent nothing for 15 s");
  EXPECT_EQ(members.epoch(), 2u);
  EXPECT_TRUE(members.CheckNoneLeft().ok());
  EXPECT_EQ(members.CheckActive(1),
            absl::FailedPreconditionError("the job goes on without this node: node 1 (host1) has "
                                          "sent nothing for 15 s"));
  EXPECT_THAT(NodesOf(members.Silent(kStart + kLease + kMoment)), ElementsAre(0, 2));
}

TEST(MembersTest, NodeThatHasLeftIsNotNeededOnceItIsLost) {
  Members members = Begun(2);
  EXPECT_TRUE(members.Leave(1));
  EXPECT_THAT(members.SetLost(1, "it is done").active, ElementsAre(0));
  EXPECT_TRUE(members.CheckNoneLeft().ok());
  EXPECT_FALSE(members.IsEmpty());
  members.SetLost(0, "it is done, too");
  EXPECT_TRUE(members.IsEmpty());
  EXPECT_EQ(members.epoch(), 3u);
}

}  // namespace
}  // namespace thalweg::membership_test
