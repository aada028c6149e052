// These tests check how long a node of another machine stays a member. Its streams are real ones.
#include "server/transport/shard/node_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/transport/guard/authorizer.h"
#include "server/transport/poller.h"
#include "server/transport/shard/server_stream.h"
#include "server/transport/shard/stream_set.h"
#include "server/transport/testing/raw_join.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg::node_table_test {
namespace {

using ::testing::HasSubstr;

constexpr Duration kGoneTime = NodeTable::kGoneTime;
constexpr Duration kMoment = std::chrono::nanoseconds(1);

class NodeTableTest : public ::testing::Test {
 protected:
  // Serves streams.
  void SetUp() override {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&exchange_);
    std::vector<std::unique_ptr<grpc::CompletionQueue>> queues;
    auto queue = builder.AddCompletionQueue();
    grpc::ServerCompletionQueue& accepting = *queue;
    queues.push_back(std::move(queue));
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    ServerStream::Accept(exchange_, accepting, authorizer_, table_, streams_);
    pollers_ = std::make_unique<Pollers>(std::move(queues));
    channel_ = ForeignChannel(absl::StrCat("127.0.0.1:", port));
  }
  void TearDown() override {
    server_->Shutdown(ToSystemTime(Now()));
    EXPECT_TRUE(streams_.WaitEmpty(Now() + kTestPatience));
    streams_.Close();
    table_.Close(absl::UnavailableError("the test is over"));
  }

  // Returns node `number`, which is a member.
  std::shared_ptr<NodeStreams> Joined(uint32_t number) {
    const auto node = table_.Make("", "");
    table_.Add(node, std::make_unique<FakeMember>(shard_, number, node));
    return node;
  }
  // Returns the node's stream, which is open.
  std::unique_ptr<RawStream> Opened(const NodeStreams& node, uint32_t incarnation) {
    auto stream = std::make_unique<RawStream>(channel_);
    EXPECT_TRUE(stream->Write(EncodeOpen({.token = node.key().token, .incarnation = incarnation})));
    AwaitOpened(*stream, shard_);
    return stream;
  }
  bool IsMember(const NodeStreams& node) { return table_.Find(node.key().token).ok(); }

  // Checks that exactly this node has left, as one that is gone.
  void ExpectGone(const NodeStreams& node, uint32_t number) {
    // Not NotFound, which would mean that the shard has been restarted.
    const absl::Status found = table_.Find(node.key().token).status();
    EXPECT_EQ(found.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(found.message()), HasSubstr("had no stream for too long"));
    const auto leaves = shard_.leaves.Get();
    ASSERT_EQ(leaves.size(), 1u);
    EXPECT_EQ(leaves.front().first, number);
    EXPECT_EQ(leaves.front().second.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(leaves.front().second.message()), HasSubstr("no stream"));
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  Authorizer authorizer_{metrics_};
  NodeTable table_{StreamCounters::In(metrics_, "server")};
  StreamSet streams_;
  ServerStream::Service exchange_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Pollers> pollers_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(NodeTableTest, NodeThatNeverOpensAStreamLeavesAfterGoneTime) {
  const TimePoint begin = Now();
  const auto node = Joined(4);
  table_.Expire(begin + kGoneTime);
  EXPECT_TRUE(IsMember(*node));
  table_.Expire(Now() + kGoneTime + kMoment);
  ExpectGone(*node, 4);
}

TEST_F(NodeTableTest, NodeOfAnEndedJobLeavesAfterTheLease) {
  const TimePoint begin = Now();
  const auto ended = Joined(4);
  const auto other = Joined(5);
  ended->OnFailed(absl::AbortedError("node 1 is gone"));
  table_.Expire(begin + kLease);
  EXPECT_TRUE(IsMember(*ended));
  table_.Expire(Now() + kLease + kMoment);
  ExpectGone(*ended, 4);
  EXPECT_TRUE(IsMember(*other));
}

TEST_F(NodeTableTest, OnlyTheLastThatHaveExpiredAreRemembered) {
  std::vector<std::shared_ptr<NodeStreams>> nodes;
  const auto expire = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) nodes.push_back(Joined(static_cast<uint32_t>(i)));
    table_.Expire(Now() + kGoneTime + kMoment);
  };
  expire(1);
  expire(NodeTable::kMostExpired - 1);
  EXPECT_TRUE(absl::IsAborted(table_.Find(nodes.front()->key().token).status()));
  expire(1);
  EXPECT_TRUE(absl::IsNotFound(table_.Find(nodes.front()->key().token).status()));
  EXPECT_TRUE(absl::IsAborted(table_.Find(nodes[1]->key().token).status()));
  EXPECT_TRUE(absl::IsAborted(table_.Find(nodes.back()->key().token).status()));
}

TEST_F(NodeTableTest, NodesOfALargeJobThatExpirePushNobodyElseOut) {
  const auto other = Joined(0);
  table_.Expire(Now() + kGoneTime + kMoment);
  constexpr uint32_t kMostOfAJob = 1024;
  for (uint32_t i = 0; i < kMostOfAJob; ++i) Joined(i);
  table_.Expire(Now() + kGoneTime + kMoment);
  EXPECT_TRUE(absl::IsAborted(table_.Find(other->key().token).status()));
}

TEST_F(NodeTableTest, NodeWithAStreamStays) {
  const auto node = Joined(4);
  const auto stream = Opened(*node, 1);
  table_.Expire(Now() + 100 * kGoneTime);
  EXPECT_TRUE(IsMember(*node));
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(NodeTableTest, NodeWhoseStreamHasBrokenLeavesAfterGoneTime) {
  const auto node = Joined(4);
  const auto first = Opened(*node, 1);
  const TimePoint begin = Now();
  first->Cancel();
  // Until the server knows of the break, the node has a stream and stays.
  const TimePoint deadline = Now() + kTestPatience;
  while (IsMember(*node) && Now() < deadline) {
    table_.Expire(begin + kGoneTime);
    ASSERT_TRUE(IsMember(*node));
    table_.Expire(Now() + kGoneTime + kMoment);
    std::this_thread::yield();
  }
  ExpectGone(*node, 4);
}

TEST_F(NodeTableTest, NodeThatMayBeAwayForLongStaysForItsLeaseOnceItHasHadAStream) {
  constexpr Duration kLong = 10 * kGoneTime;
  const auto joined = [&](uint32_t number) {
    const auto node = table_.Make("", "", kLong);
    table_.Add(node, std::make_unique<FakeMember>(shard_, number, node));
    return node;
  };
  const auto without = joined(4);
  const auto with = joined(5);
  const TimePoint begin = Now();
  Opened(*with, 1)->Cancel();
  // Until the server knows of the break.
  const TimePoint deadline = Now() + kTestPatience;
  while (!with->IsGone(Now() + 2 * kLong) && Now() < deadline) std::this_thread::yield();
  table_.Expire(Now() + kGoneTime + kMoment);
  ExpectGone(*without, 4);
  table_.Expire(begin + kLong);
  EXPECT_TRUE(IsMember(*with));
}

TEST_F(NodeTableTest, LettersThatComeBeforeTheirStreamWaitForItInTheirOrder) {
  const auto node = Joined(4);
  for (const uint32_t chunk : {0u, 1u, 2u}) {
    RoundResult letter = ResultOf(chunk, {});
    letter.id.bucket = LettersOf(1);
    node->OnResult(std::move(letter));
  }
  std::vector<uint32_t> arrived;
  for (const uint32_t number : {0u, 1u}) {
    // The first incarnation of the second stream broke before it came here.
    const uint32_t incarnation = number + 1;
    RawStream stream(channel_);
    ASSERT_TRUE(stream.Write(EncodeOpen({.token = node->key().token,
                                         .stream = number,
                                         .num_streams = 2,
                                         .incarnation = incarnation})));
    grpc::ByteBuffer frame;
    if (incarnation > 1) ASSERT_TRUE(stream.Read(&frame));  // what the shard has received
    for (uint32_t chunk = number; chunk < 3; chunk += 2) {
      grpc::ByteBuffer letter;
      ASSERT_TRUE(stream.Read(&letter));
      const auto parsed = ParseFrame(std::move(letter));
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      arrived.push_back(std::get<ChunkFrame>(*parsed).header.id.chunk);
    }
  }
  EXPECT_THAT(arrived, ::testing::ElementsAre(0, 2, 1));
}

TEST_F(NodeTableTest, NodeThatLeavesIsForgotten) {
  const auto node = Joined(4);
  EXPECT_EQ(*table_.Find(node->key().token), node);
  node->Leave(absl::OkStatus());
  node->Leave(absl::AbortedError("once more"));
  const absl::Status found = table_.Find(node->key().token).status();
  EXPECT_EQ(found, absl::NotFoundError(
                       "no such membership: it has ended, or the shard has been restarted"));
  table_.Expire(Now() + 100 * kGoneTime);
  const auto leaves = shard_.leaves.Get();
  ASSERT_EQ(leaves.size(), 1u);
  EXPECT_TRUE(leaves.front().second.ok());
}

TEST_F(NodeTableTest, ForgottenNodeIsNotFoundAndHasNotLeft) {
  const auto node = Joined(4);
  table_.Forget(node->key().token);
  EXPECT_TRUE(absl::IsNotFound(table_.Find(node->key().token).status()));
  EXPECT_TRUE(shard_.leaves.Get().empty());
  table_.Forget(node->key().token);  // which is harmless
}

TEST_F(NodeTableTest, TokensDifferAndOthersAreNotFound) {
  const auto a = Joined(4);
  const auto b = Joined(4);
  EXPECT_NE(a->key().token, b->key().token);
  EXPECT_NE(a->key().token, 0u);
  for (const SessionToken token : {SessionToken{0}, a->key().token + 1, ~SessionToken{0}}) {
    EXPECT_TRUE(absl::IsNotFound(table_.Find(token).status())) << token;
    EXPECT_TRUE(absl::IsNotFound(table_.Admit({.token = token}, nullptr).status())) << token;
  }
}

TEST_F(NodeTableTest, NodeIsNotFoundBeforeItHasJoined) {
  const auto node = table_.Make("", "");
  EXPECT_TRUE(absl::IsNotFound(table_.Find(node->key().token).status()));
}

TEST_F(NodeTableTest, StreamOfAnotherIdentityIsRefused) {
  const auto node = table_.Make("owner", "");
  table_.Add(node, std::make_unique<FakeMember>(shard_, 4, node));
  for (const char* identity : {"", "thief"}) {
    const auto admitted = table_.Admit({.token = node->key().token, .identity = identity}, nullptr);
    EXPECT_EQ(admitted.status().code(), absl::StatusCode::kPermissionDenied);
  }
  EXPECT_TRUE(IsMember(*node));
}

TEST_F(NodeTableTest, CloseEndsAllMemberships) {
  const auto without_stream = Joined(4);
  const auto with_stream = Joined(5);
  const auto stream = Opened(*with_stream, 1);
  const absl::Status why = absl::UnavailableError("its aggregator is stopping");
  table_.Close(why);
  table_.Close(why);
  EXPECT_FALSE(IsMember(*without_stream));
  EXPECT_FALSE(IsMember(*with_stream));
  EXPECT_THAT(shard_.leaves.Get(),
              ::testing::UnorderedElementsAre(std::pair(4u, why), std::pair(5u, why)));
}

}  // namespace
}  // namespace thalweg::node_table_test
