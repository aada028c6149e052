// These tests let a shard that can be reached end streams and calls at once, for as long as a node
// tries: it must not try without a pause.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/node/control_client.h"
#include "server/transport/node/shard_streams.h"
#include "server/transport/poller.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recorder.h"
#include "thalweg/v1/control.grpc.pb.h"
#include "thalweg/v1/exchange.grpc.pb.h"

namespace thalweg::refusing_shard_test {
namespace {

constexpr Duration kGrace = std::chrono::seconds(2);
// A pause of 100 ms lets so many attempts begin in this time; the first one comes before it.
constexpr int kMostAttempts = 1 + 20 + 1;

// What a proxy in front of a shard that is gone might answer.
grpc::Status Refusal() { return {grpc::StatusCode::UNAVAILABLE, "no healthy upstream"}; }

class RefusingExchange : public v1::Exchange::Service {
 public:
  grpc::Status Stream(grpc::ServerContext*,
                      grpc::ServerReaderWriter<v1::Frame, v1::Frame>*) override {
    ++attempts;
    return Refusal();
  }
  std::atomic<int> attempts{0};
};

class RefusingControl : public v1::Control::Service {
 public:
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest*,
                         v1::HeartbeatResponse*) override {
    ++attempts;
    return Refusal();
  }
  std::atomic<int> attempts{0};
};

class RefusingShardTest : public ::testing::Test {
 protected:
  RefusingShardTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&exchange_);
    builder.RegisterService(&control_);
    server_ = builder.BuildAndStart();
    channel_ = ForeignChannel(absl::StrCat("127.0.0.1:", port));
  }

  MetricRegistry metrics_;
  RefusingExchange exchange_;
  RefusingControl control_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(RefusingShardTest, StreamIsOpenedAgainWithPausesUntilTheGraceIsOver) {
  Pollers pollers(1);
  const auto events = std::make_shared<RecordingEvents>();
  const TimePoint begin = Now();
  const auto streams =
      ShardStreams::Open({{{channel_, &pollers.Next()}}, "the shard", {.token = 1}, kGrace}, events,
                         StreamCounters::In(metrics_, "client"));
  EXPECT_EQ(events->failures.WaitFor(1).size(), 1u);
  EXPECT_GE(Now() - begin, kGrace - std::chrono::milliseconds(100));
  EXPECT_GE(exchange_.attempts, 2);
  EXPECT_LE(exchange_.attempts, kMostAttempts);
  streams->Cancel();
  EXPECT_TRUE(streams->WaitDone(Now() + kTestPatience));
}

TEST_F(RefusingShardTest, CallIsRepeatedWithPausesUntilTheGraceIsOver) {
  ControlClient client({.name = "the shard", .grace = kGrace}, channel_);
  v1::HeartbeatResponse response;
  const absl::Status status = client.CallAgain(
      &v1::Control::Stub::Heartbeat, v1::HeartbeatRequest(), &response, Now() + kTestPatience);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_GE(control_.attempts, 2);
  EXPECT_LE(control_.attempts, kMostAttempts);
}

}  // namespace
}  // namespace thalweg::refusing_shard_test
