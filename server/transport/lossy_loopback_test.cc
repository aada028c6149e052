// These tests send lossy parts and residuals between a node and a shard over loopback gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/base/protocol.h"
#include "server/transport/fake_shard.h"
#include "server/transport/remote_shard.h"
#include "server/transport/shard_server.h"

namespace thalweg {
namespace {

using ::testing::HasSubstr;

constexpr BucketId kPart{7, 1, 13};
constexpr uint64_t kMostElems = kMaxChunkBytes / sizeof(float);

TimePoint Soon() { return Now() + kTestPatience; }

class LossyLoopbackTest : public ::testing::TestWithParam<WireFormat> {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    node_ = RemoteShard::Create(server_->address(), {}, metrics_);
    const auto membership = node_->Join({}, Soon());
    ASSERT_TRUE(membership.ok()) << membership.status();
    token_ = membership->token;
    ASSERT_TRUE(node_->Attach(token_, "", sink_).ok());
  }

  static std::shared_ptr<std::string> RandomBytes(size_t size) {
    auto bytes = std::make_shared<std::string>(size, '\0');
    std::mt19937_64 random(size);
    for (char& byte : *bytes) byte = static_cast<char>(random());
    return bytes;
  }

  MetricRegistry metrics_;
  FakeShard shard_;
  std::shared_ptr<RecordingSink> sink_ = std::make_shared<RecordingSink>();
  std::unique_ptr<ShardServer> server_;
  std::unique_ptr<RemoteShard> node_;
  SessionToken token_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Formats, LossyLoopbackTest,
                         ::testing::Values(WireFormat::kInt8, WireFormat::kOneBit,
                                           WireFormat::kTopK),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(LossyLoopbackTest, PayloadsOfEverySizeArriveByteForByteBothWays) {
  const std::vector<uint64_t> sizes = {0, 1, 1000, 4096, kMostElems};
  uint32_t chunk = 0;
  for (uint64_t elems : sizes) {
    const auto bytes = RandomBytes(MaxEncodedBytes(GetParam(), elems));
    ASSERT_TRUE(node_
                    ->Contribute(token_, {{kPart, chunk++, 9},
                                          5,
                                          GetParam(),
                                          elems,
                                          Payload(std::as_bytes(std::span(*bytes)), bytes)})
                    .ok());
  }
  const auto contributions = shard_.contributions.WaitFor(sizes.size());
  const auto results = sink_->results.WaitFor(sizes.size());
  ASSERT_EQ(contributions.size(), sizes.size());
  ASSERT_EQ(results.size(), sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::string expected = *RandomBytes(MaxEncodedBytes(GetParam(), sizes[i]));
    EXPECT_EQ(contributions[i].id, (RoundId{kPart, static_cast<uint32_t>(i), 9}));
    EXPECT_EQ(contributions[i].wire, GetParam());
    EXPECT_EQ(contributions[i].elems, sizes[i]);
    EXPECT_TRUE(BytesOf(contributions[i].payload) == expected) << sizes[i];
    EXPECT_EQ(results[i].id, contributions[i].id);
    EXPECT_EQ(results[i].wire, GetParam());
    EXPECT_EQ(results[i].elems, sizes[i]);
    EXPECT_TRUE(BytesOf(results[i].payload) == expected) << sizes[i];
  }
  EXPECT_TRUE(sink_->failures.Get().empty());
}

TEST_P(LossyLoopbackTest, AnnouncementCarriesFormatAndPart) {
  const BucketLayout layout{DType::kFloat32, {{"w", {3, 4}}}};
  ASSERT_TRUE(node_->RegisterBucket(token_, {kPart, layout, GetParam(), 1}, Soon()).ok());
  const BucketAnnouncement announced = shard_.buckets.WaitFor(1).front();
  EXPECT_EQ(announced.id, kPart);
  EXPECT_EQ(announced.layout, layout);
  EXPECT_EQ(announced.wire, GetParam());
}

using ResidualLoopbackTest = LossyLoopbackTest;
INSTANTIATE_TEST_SUITE_P(Formats, ResidualLoopbackTest, ::testing::Values(WireFormat::kInt8));

TEST_P(ResidualLoopbackTest, ResidualOfTheLargestChunkArrivesBothWaysBitForBit) {
  std::vector<float> values(kMostElems);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * -0.37f;
  values[1] = -0.0f;
  values[2] = std::numeric_limits<float>::denorm_min();
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
  };
  ASSERT_TRUE(node_->WriteResidual(token_, kPart, 3, values, Soon()).ok());
  const FakeShard::ResidualCall written = shard_.residual_writes.WaitFor(1).front();
  EXPECT_EQ(written.token, token_);
  EXPECT_EQ(written.bucket, kPart);
  EXPECT_EQ(written.chunk, 3u);
  EXPECT_TRUE(same(written.values, values));

  shard_.residual_answer = values;
  const auto answer = node_->ReadResidual(token_, kPart, 4, Soon());
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(same(*answer, values));
  const FakeShard::ResidualCall read = shard_.residual_reads.WaitFor(1).front();
  EXPECT_EQ(read.token, token_);
  EXPECT_EQ(read.bucket, kPart);
  EXPECT_EQ(read.chunk, 4u);
}

TEST_P(ResidualLoopbackTest, MissingResidualIsEmpty) {
  EXPECT_EQ(node_->ReadResidual(token_, kPart, 0, Soon()).value(), std::vector<float>());
}

TEST_P(ResidualLoopbackTest, ShardsRefusalKeepsCodeAndReason) {
  shard_.residual_answer = absl::FailedPreconditionError("bucket 7 has not been registered");
  for (const absl::Status& status :
       {node_->ReadResidual(token_, kPart, 0, Soon()).status(),
        node_->WriteResidual(token_, kPart, 0, std::vector<float>(1), Soon())}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(server_->address() + ": bucket 7 has not been registered"));
  }
}

}  // namespace
}  // namespace thalweg
