// These tests run jobs with secrets through a real aggregator over loopback gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/thread.h"
#include "server/aggregator/aggregator.h"
#include "server/identity/job_key.h"
#include "server/transport/channel_options.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/proofs.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/known_member.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"
#include "server/transport/wire/frame_codec.h"

namespace thalweg::job_secret_test {
namespace {

TimePoint Soon() { return Now() + kTestPatience; }

std::shared_ptr<const JobKey> KeyOf(char digit) {
  return JobKey::FromHex(std::string(64, digit)).value();
}

// Returns a node's request to join 'job'.
JoinRequest Request(const std::shared_ptr<const JobKey>& key, uint32_t node, uint32_t num_nodes) {
  JoinRequest request;
  request.job = "job";
  request.node = node;
  request.node_name = absl::StrCat("host", node);
  request.workers = 1;
  request.num_nodes = num_nodes;
  request.world_size = num_nodes;
  request.num_shards = 1;
  request.round_timeout = kTestPatience;
  if (key != nullptr) request.identity = key->public_key();
  request.signer = key;
  return request;
}

// A TwoNodeJob is a job of two nodes, which both have two connections.
class TwoNodeJob {
 public:
  TwoNodeJob(const std::string& address, std::shared_ptr<const JobKey> key, MetricRegistry& metrics)
      : key_(std::move(key)) {
    for (Node& node : nodes_) node.remote = RemoteShard::Create(address, {.channels = 2}, metrics);
  }

  // Waits for the other node.
  void Join(uint32_t node) {
    Node& n = nodes_[node];
    n.joined = n.remote->Join(Request(key_, node, 2), n.events, Soon());
    if (n.joined.ok()) n.member = n.joined->get();
  }
  // Does the same over `channel`, and returns the node's token.
  SessionToken JoinKnown(uint32_t node, const std::shared_ptr<grpc::Channel>& channel,
                         MetricRegistry& metrics) {
    Node& n = nodes_[node];
    auto known = KnownMember::Join(channel, Request(key_, node, 2), n.events, metrics);
    if (!known.ok()) {
      n.joined = known.status();
      return 0;
    }
    n.known = *std::move(known);
    n.member = &n.known->member();
    return n.known->token();
  }

  void Begin() {
    for (const Node& node : nodes_) {
      ASSERT_NE(node.member, nullptr) << node.joined.status();
      const BucketLayout layout{DType::kFloat32, {{"w", {1}}}};
      ASSERT_TRUE(node.member->Register({{0, 0}, layout}, Soon()).ok());
    }
  }
  void JoinAndBegin() {
    {
      Thread first("node 0", [this] { Join(0); });
      Join(1);
    }
    Begin();
  }

  // Averages a number of each node.
  void Exchange(float a, float b) {
    ++round_;
    for (uint32_t k = 0; k < 2; ++k) {
      Member& member = *nodes_[k].member;
      const auto value = std::make_shared<float>(k == 0 ? a : b);
      const Payload payload(std::as_bytes(std::span(value.get(), 1)), value);
      ASSERT_TRUE(
          member
              .Contribute(
                  {{{0, 0}, 0, round_}, member.terms().epoch, WireFormat::kFloat32, 1, payload})
              .ok());
    }
    for (const Node& node : nodes_) {
      const auto results = node.events->results.WaitFor(round_);
      ASSERT_EQ(results.size(), round_);
      float mean = 0;
      std::memcpy(&mean, BytesOf(results.back().payload).data(), sizeof(mean));
      EXPECT_EQ(mean, (a + b) / 2);
      EXPECT_TRUE(node.events->failures.Get().empty());
    }
  }

 private:
  struct Node {
    std::unique_ptr<RemoteShard> remote;
    std::shared_ptr<RecordingEvents> events = std::make_shared<RecordingEvents>();
    absl::StatusOr<std::unique_ptr<Member>> joined = absl::UnknownError("has not joined");
    std::unique_ptr<KnownMember> known;
    Member* member = nullptr;  // one of both
  };

  const std::shared_ptr<const JobKey> key_;
  std::array<Node, 2> nodes_;
  uint64_t round_ = 0;
};

class JobSecretTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, aggregator_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  std::shared_ptr<grpc::Channel> NewChannel() {
    return grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                     ClientArguments());
  }
  TwoNodeJob NewJob(char digit) { return {server_->address(), KeyOf(digit), metrics_}; }

  // Joins from somewhere else.
  absl::StatusOr<std::unique_ptr<Member>> JoinAsStranger(const JoinRequest& request) {
    strangers_.push_back(RemoteShard::Create(server_->address(), {}, metrics_));
    return strangers_.back()->Join(request, std::make_shared<RecordingEvents>(), Soon());
  }

  void WaitForJobs(size_t count) {
    const TimePoint deadline = Soon();
    while (aggregator_.num_jobs() < count && Now() < deadline) std::this_thread::yield();
    ASSERT_EQ(aggregator_.num_jobs(), count);
  }

  MetricRegistry metrics_;
  Aggregator aggregator_{{}, metrics_};
  std::unique_ptr<ShardServer> server_;
  std::vector<std::unique_ptr<RemoteShard>> strangers_;
};

TEST_F(JobSecretTest, NodesWithTheSecretTrain) {
  TwoNodeJob job = NewJob('1');
  ASSERT_NO_FATAL_FAILURE(job.JoinAndBegin());
  for (int round = 0; round < 3; ++round) job.Exchange(static_cast<float>(round), 5);
}

TEST_F(JobSecretTest, JobsOfOneNameWithDifferentSecretsTrainSideBySide) {
  TwoNodeJob a = NewJob('1');
  TwoNodeJob b = NewJob('2');
  ASSERT_NO_FATAL_FAILURE(a.JoinAndBegin());
  ASSERT_NO_FATAL_FAILURE(b.JoinAndBegin());
  EXPECT_EQ(aggregator_.num_jobs(), 2u);
  for (int round = 0; round < 3; ++round) {
    a.Exchange(1, 2);
    b.Exchange(10, 20);
  }
}

TEST_F(JobSecretTest, StrangersNeitherEnterNorFailNorHoldUpAJobThatGathers) {
  TwoNodeJob job = NewJob('1');
  {
    Thread first("node 0", [&] { job.Join(0); });
    WaitForJobs(1);
    // Without a secret, and with another one, a stranger names jobs of its own, whatever it says
    // about them.
    const auto without = JoinAsStranger(Request(nullptr, 0, 1));
    EXPECT_TRUE(without.ok()) << without.status();
    const auto other = JoinAsStranger(Request(KeyOf('2'), 0, 1));
    EXPECT_TRUE(other.ok()) << other.status();
    EXPECT_EQ(aggregator_.num_jobs(), 3u);
    // The job's identity is no secret, but does not suffice.
    JoinRequest pretender = Request(KeyOf('1'), 1, 2);
    for (const auto& signer : {std::shared_ptr<const JobKey>(), KeyOf('2')}) {
      pretender.signer = signer;
      EXPECT_EQ(JoinAsStranger(pretender).status().code(), absl::StatusCode::kPermissionDenied);
    }
    job.Join(1);
  }
  ASSERT_NO_FATAL_FAILURE(job.Begin());
  job.Exchange(3, 4);
}

TEST_F(JobSecretTest, StolenTokenOpensNoStreamAndTheJobGoesOn) {
  TwoNodeJob job = NewJob('1');
  SessionToken token = 0;
  {
    Thread first("node 0", [&job] { job.Join(0); });
    token = job.JoinKnown(1, NewChannel(), metrics_);
  }
  ASSERT_NO_FATAL_FAILURE(job.Begin());
  job.Exchange(1, 2);
  for (const auto& identity : {std::string(), KeyOf('1')->public_key(), KeyOf('2')->public_key()}) {
    OpenFrame open{token, 0, 1, identity};
    open.proof = KeyOf('2')->Sign(StreamStatement(open));
    RawStream thief(NewChannel());
    ASSERT_TRUE(thief.Write(EncodeOpen(open)));
    EXPECT_EQ(thief.Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  }
  job.Exchange(3, 4);
}

}  // namespace
}  // namespace thalweg::job_secret_test
