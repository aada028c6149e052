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
#include "server/transport/testing/loopback.h"

namespace thalweg::lossy_loopback_test {
namespace {

using ::testing::HasSubstr;

constexpr BucketId kPart{7, 1, 13};
constexpr uint64_t kMostElems = kMaxChunkBytes / sizeof(float);

TimePoint Soon() { return Now() + kTestPatience; }

class LossyLoopbackTest : public Loopback, public ::testing::WithParamInterface<WireFormat> {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Loopback::SetUp());
    auto member = remote_->Join(OfNode(6), events_, Soon());
    ASSERT_TRUE(member.ok()) << member.status();
    member_ = *std::move(member);
  }

  static std::shared_ptr<std::string> RandomBytes(size_t size) {
    auto bytes = std::make_shared<std::string>(size, '\0');
    std::mt19937_64 random(size);
    for (char& byte : *bytes) byte = static_cast<char>(random());
    return bytes;
  }

  std::unique_ptr<Member> member_;
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
    const Payload payload(std::as_bytes(std::span(*bytes)), bytes);
    ASSERT_TRUE(member_->Contribute({{kPart, chunk++, 9}, 5, GetParam(), elems, payload}).ok());
  }
  const auto contributions = shard_.contributions.WaitFor(sizes.size());
  const auto results = events_->results.WaitFor(sizes.size());
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
  EXPECT_TRUE(events_->failures.Get().empty());
}

TEST_P(LossyLoopbackTest, AnnouncementCarriesFormatAndPart) {
  const BucketLayout layout{DType::kFloat32, {{"w", {3, 4}}}};
  ASSERT_TRUE(member_->Register({kPart, layout, GetParam(), 1}, Soon()).ok());
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
  ASSERT_TRUE(member_->WriteResidual(kPart, 3, values, Soon()).ok());
  const RecordingShard::ResidualCall written = shard_.residual_writes.WaitFor(1).front();
  EXPECT_EQ(written.node, 6u);
  EXPECT_EQ(written.bucket, kPart);
  EXPECT_EQ(written.chunk, 3u);
  EXPECT_TRUE(same(written.values, values));

  shard_.residual_answer = values;
  const auto answer = member_->ReadResidual(kPart, 4, Soon());
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(same(*answer, values));
  const RecordingShard::ResidualCall read = shard_.residual_reads.WaitFor(1).front();
  EXPECT_EQ(read.node, 6u);
  EXPECT_EQ(read.bucket, kPart);
  EXPECT_EQ(read.chunk, 4u);
}

TEST_P(ResidualLoopbackTest, MissingResidualIsEmpty) {
  EXPECT_EQ(member_->ReadResidual(kPart, 0, Soon()).value(), std::vector<float>());
}

TEST_P(ResidualLoopbackTest, ShardsRefusalKeepsCodeAndReason) {
  shard_.residual_answer = absl::FailedPreconditionError("bucket 7 has not been registered");
  for (const absl::Status& status :
       {member_->ReadResidual(kPart, 0, Soon()).status(),
        member_->WriteResidual(kPart, 0, std::vector<float>(1), Soon())}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(server_->address() + ": bucket 7 has not been registered"));
  }
}

}  // namespace
}  // namespace thalweg::lossy_loopback_test
