// This test plays a shard that breaks the protocol towards a node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "grpcpp/grpcpp.h"
#include "server/transport/testing/frame_test_util.h"
#include "server/transport/testing/known_member.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recorder.h"
#include "thalweg/v1/exchange.grpc.pb.h"

namespace thalweg::hostile_shard_test {
namespace {

using ::testing::HasSubstr;

// A HostileShard answers `open` with one frame, and waits until the node ends the stream.
class HostileShard : public v1::Exchange::Service {
 public:
  explicit HostileShard(const v1::Frame& answer) : answer_(answer) {}

  grpc::Status Stream(grpc::ServerContext* /*context*/,
                      grpc::ServerReaderWriter<v1::Frame, v1::Frame>* stream) override {
    v1::Frame frame;
    if (stream->Read(&frame)) stream->Write(answer_);
    while (stream->Read(&frame)) {
    }
    return grpc::Status::OK;
  }

 private:
  const v1::Frame answer_;
};

TEST(HostileShardTest, ContributionFromAShardFailsTheNodeWithTheReason) {
  HostileShard shard(ToProto({{.id = {}, .kind = ChunkKind::kContribution}, {}}));
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&shard);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  MetricRegistry metrics;
  const auto events = std::make_shared<RecordingEvents>();
  {
    const KnownMember node(ForeignChannel("127.0.0.1:" + std::to_string(port)), {.token = 1}, {},
                           events, metrics);
    const auto failures = events->failures.WaitFor(1);
    ASSERT_EQ(failures.size(), 1u);
    EXPECT_EQ(failures.front().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(failures.front().message()),
                HasSubstr("the shard: sent a contribution, expected results only"));
    EXPECT_TRUE(events->results.Get().empty());
  }
  server->Shutdown();
}

}  // namespace
}  // namespace thalweg::hostile_shard_test
