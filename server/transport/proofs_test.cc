// In these tests, callers lack the job's secret or use parts of somebody else's proof: the shard
// must not hear of them, and the job's nodes must be served as before.
#include "server/transport/proofs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/identity/job_key.h"
#include "server/transport/channel_options.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/raw_join.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"
#include "server/transport/wire/control_codec.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg::proofs_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kDenied = grpc::StatusCode::PERMISSION_DENIED;

const std::string kSecret(64, '7');

TimePoint Soon() { return Now() + kTestPatience; }

TEST(ProofsTest, StatementsAreThoseOfTheDocumentation) {
  v1::JoinRequest join;
  join.set_job("bert\nlarge");
  join.set_node(3);
  join.set_shard(1);
  join.set_nonce(std::string("\x00\xff\x1a", 3));
  EXPECT_EQ(JoinStatement(join), "thalweg.v1.Join\n00ff1a\n3\n1\nbert\nlarge");
  EXPECT_EQ(StreamStatement(
                {.token = 0xffffffffffffffffu, .stream = 1, .num_streams = 2, .incarnation = 3}),
            "thalweg.v1.Stream\n18446744073709551615\n1\n2\n3");
}

class ProvedJoinTest : public ::testing::Test {
 protected:
  void SetUp() override { StartServer(std::chrono::seconds(30)); }

  void StartServer(Duration challenge_lifetime) {
    server_.reset();
    auto server = ShardServer::Start(
        {.listen = "127.0.0.1:0", .challenge_lifetime = challenge_lifetime}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = ChannelTo(*server_);
    remote_ = RemoteShard::Create(server_->address(), {}, metrics_);
  }

  static std::shared_ptr<grpc::Channel> ChannelTo(const ShardServer& server) {
    return grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(),
                                     ClientArguments());
  }

  static std::string Challenge(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(Soon()));
    v1::ChallengeResponse response;
    EXPECT_TRUE(v1::Control::NewStub(channel)->Challenge(&context, {}, &response).ok());
    return response.nonce();
  }

  grpc::Status Join(const v1::JoinRequest& request) { return RawJoin(channel_, request, &token_); }
  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request) {
    return remote_->Join(request, std::make_shared<RecordingEvents>(), Soon());
  }

  // Returns a Join of node 0 that proves the secret with `nonce`.
  v1::JoinRequest Proved(const std::string& nonce) {
    v1::JoinRequest request = ToProto(OfNode(0));
    request.set_job("bert");
    request.set_identity(key_->public_key());
    request.set_nonce(nonce);
    request.set_proof(key_->Sign(JoinStatement(request)));
    return request;
  }

  void ExpectRefused(const v1::JoinRequest& request, const std::string& text) {
    const size_t joins_before = shard_.joins.Get().size();
    const grpc::Status status = Join(request);
    EXPECT_EQ(status.error_code(), kDenied) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(text));
    EXPECT_EQ(shard_.joins.Get().size(), joins_before);
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  const std::shared_ptr<const JobKey> key_ = JobKey::FromHex(kSecret).value();
  const std::shared_ptr<const JobKey> other_key_ = JobKey::FromHex(std::string(64, '8')).value();
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<RemoteShard> remote_;
  SessionToken token_ = 0;  // of the last Join
};

TEST_F(ProvedJoinTest, IdentityReachesTheShardAndItsKeyDoesNot) {
  JoinRequest request = OfNode(1);
  request.identity = key_->public_key();
  request.signer = key_;
  const auto member = Join(request);
  ASSERT_TRUE(member.ok()) << member.status();
  ASSERT_TRUE(Join(OfNode(2)).ok());
  const auto joins = shard_.joins.WaitFor(2);
  EXPECT_EQ(joins[0].first.identity, key_->public_key());
  EXPECT_EQ(joins[0].first.signer, nullptr);
  EXPECT_EQ(joins[1].first.identity, "");
}

TEST_F(ProvedJoinTest, IdentityWithoutItsSecretIsRefused) {
  JoinRequest request = OfNode(1);
  request.identity = key_->public_key();
  for (const auto& signer : {std::shared_ptr<const JobKey>(), other_key_}) {
    request.signer = signer;
    const absl::Status status = Join(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(server_->address()), HasSubstr("node 1"), HasSubstr("secret"),
                      Not(HasSubstr(kSecret))));
  }
  EXPECT_TRUE(shard_.joins.Get().empty());
}

TEST_F(ProvedJoinTest, AlteredJoinIsRefusedAndSpendsNoChallenge) {
  const v1::JoinRequest genuine = Proved(Challenge(channel_));
  const auto expect_refused = [&](const std::function<void(v1::JoinRequest&)>& alter) {
    v1::JoinRequest altered = genuine;
    alter(altered);
    ExpectRefused(altered, "has not proved that it knows the secret");
  };
  expect_refused([](auto& join) { join.set_node(1); });
  expect_refused([](auto& join) { join.set_shard(1); });
  expect_refused([](auto& join) { join.set_job("bert2"); });
  expect_refused([&](auto& join) { join.set_nonce(Challenge(channel_)); });
  expect_refused([](auto& join) { join.clear_nonce(); });
  expect_refused([](auto& join) { join.clear_proof(); });
  expect_refused([](auto& join) { (*join.mutable_proof())[5] ^= 1; });
  expect_refused([](auto& join) { join.mutable_proof()->pop_back(); });
  expect_refused([](auto& join) { join.mutable_proof()->push_back('x'); });
  expect_refused([&](auto& join) { join.set_identity(other_key_->public_key()); });
  expect_refused([](auto& join) { join.mutable_identity()->pop_back(); });
  expect_refused([](auto& join) { join.mutable_identity()->push_back('x'); });
  expect_refused([](auto& join) { join.set_identity(std::string(1 << 16, 'x')); });
  EXPECT_TRUE(Join(genuine).ok());
}

TEST_F(ProvedJoinTest, RepeatedJoinIsRefused) {
  const v1::JoinRequest request = Proved(Challenge(channel_));
  EXPECT_TRUE(Join(request).ok());
  ExpectRefused(request, "used before");
  EXPECT_TRUE(Join(Proved(Challenge(channel_))).ok());
}

TEST_F(ProvedJoinTest, ExpiredChallengeIsRefused) {
  ASSERT_NO_FATAL_FAILURE(StartServer(Duration::zero()));
  ExpectRefused(Proved(Challenge(channel_)), "expired");
}

TEST_F(ProvedJoinTest, ChallengeOfAnotherServerIsRefused) {
  RecordingShard shard;
  const auto other = ShardServer::Start({.listen = "127.0.0.1:0"}, shard, metrics_);
  ASSERT_TRUE(other.ok()) << other.status();
  ExpectRefused(Proved(Challenge(ChannelTo(**other))), "not one of this server's");
  ExpectRefused(Proved("x"), "not one of this server's");
}

TEST_F(ProvedJoinTest, AggregatorThatCannotCheckASecretIsNamed) {
  v1::Control::Service earlier_release;  // implements no call
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&earlier_release);
  const auto server = builder.BuildAndStart();
  const auto node = RemoteShard::Create(absl::StrCat("127.0.0.1:", port), {}, metrics_);
  JoinRequest request = OfNode(0);
  request.identity = key_->public_key();
  request.signer = key_;
  const absl::Status status =
      node->Join(request, std::make_shared<RecordingEvents>(), Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(absl::StrCat(port)), HasSubstr("cannot check a job's secret")));
}

// The member is node 0 with two streams.
class StolenTokenTest : public ProvedJoinTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(ProvedJoinTest::SetUp());
    ASSERT_TRUE(Join(Proved(Challenge(channel_))).ok());
  }

  // Returns the frame that opens the member's stream `stream` with the proof of `key`.
  OpenFrame ProvedOpen(uint32_t stream, const JobKey& key) const {
    OpenFrame open{token_, stream, 2, key.public_key()};
    open.proof = key.Sign(StreamStatement(open));
    return open;
  }

  std::unique_ptr<RawStream> Opened(const OpenFrame& open) {
    auto stream = std::make_unique<RawStream>(channel_);
    EXPECT_TRUE(stream->Write(EncodeOpen(open)));
    return stream;
  }

  // Sends a chunk that the shard echoes.
  static void ExpectEcho(RawStream& stream, uint32_t chunk) {
    ASSERT_TRUE(stream.Write(EncodeChunk({{{}, chunk, 1}}, {})));
    grpc::ByteBuffer answer;
    ASSERT_TRUE(stream.Read(&answer));
    const auto parsed = ParseFrame(std::move(answer));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    ASSERT_TRUE(std::holds_alternative<ChunkFrame>(*parsed));
    EXPECT_EQ(std::get<ChunkFrame>(*parsed).header.id.chunk, chunk);
  }

  // Returns what somebody may send who knows the member's token and identity.
  std::vector<OpenFrame> Thefts() const {
    const OpenFrame genuine = ProvedOpen(0, *key_);
    std::vector<OpenFrame> thefts(9, genuine);
    thefts[0].identity.clear();
    thefts[0].proof.clear();
    thefts[1].proof.clear();
    thefts[2].proof = other_key_->Sign(StreamStatement(genuine));
    thefts[3] = ProvedOpen(0, *other_key_);
    thefts[4] = ProvedOpen(1, *other_key_);
    thefts[5].stream = 1;
    thefts[6].num_streams = 1;
    thefts[7].proof.pop_back();
    thefts[8].identity.push_back('x');
    return thefts;
  }

  void ExpectThievesRefused() {
    for (const OpenFrame& theft : Thefts()) {
      const grpc::Status status = Opened(theft)->Finish();
      EXPECT_EQ(status.error_code(), kDenied) << status.error_message();
    }
    EXPECT_TRUE(shard_.leaves.Get().empty());
  }
};

TEST_F(StolenTokenTest, ThiefsStreamEndsAloneAndTheMembersGoOn) {
  const auto first = Opened(ProvedOpen(0, *key_));
  ExpectEcho(*first, 0);
  const auto second = Opened(ProvedOpen(1, *key_));
  ExpectEcho(*second, 1);
  ExpectThievesRefused();
  ExpectEcho(*first, 2);
  ExpectEcho(*second, 3);
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(StolenTokenTest, ThiefWhoComesFirstDoesNotKeepTheMemberOut) {
  ExpectThievesRefused();
  const auto second = Opened(ProvedOpen(1, *key_));
  ExpectEcho(*second, 1);
  const auto first = Opened(ProvedOpen(0, *key_));
  ExpectEcho(*first, 0);
}

TEST_F(StolenTokenTest, RepeatedOpenEndsAlone) {
  const OpenFrame open = ProvedOpen(0, *key_);
  const auto first = Opened(open);
  ExpectEcho(*first, 0);
  EXPECT_EQ(Opened(open)->Finish().error_code(), grpc::StatusCode::ALREADY_EXISTS);
  ExpectEcho(*first, 2);
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

}  // namespace
}  // namespace thalweg::proofs_test
