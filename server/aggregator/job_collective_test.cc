#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_collective_test {
namespace {

constexpr uint64_t kElems = 3;
constexpr RoundId kId{{0, 0}, 0, 1};

Payload PayloadOf(const std::vector<float>& values) {
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  return Split(Bytes(bytes, bytes + values.size() * sizeof(float)), {});
}
const std::vector<float> kValues = {1, -2, 3};

// Returns a contribution to the first one-shot round of group 1.
Contribution ToGroup(const Collective& collective, Payload payload = {}) {
  Contribution share{{OneShotsOf(1), 0, 1}, 1, WireFormat::kFloat32, kElems, std::move(payload)};
  share.group = 1;
  share.collective = collective;
  return share;
}

TEST(JobCollectiveTest, NodesThatGetNoResultGetAReceipt) {
  TestJob job({1, 2});
  job.Register(kId.bucket, kElems, WireFormat::kFloat32);
  const Payload payload = PayloadOf(kValues);
  for (uint32_t node = 0; node < 2; ++node) {
    Contribution share{kId, 1, WireFormat::kFloat32, kElems, payload};
    share.collective = {Place::All(), Place::One(1), Fold::kMax};
    ASSERT_TRUE(job.job().Contribute(node, share, Now()).ok());
  }
  ASSERT_EQ(job.sink(0).results.size(), 1u);
  EXPECT_EQ(job.sink(0).results[0].id, kId);
  EXPECT_EQ(job.sink(0).results[0].payload.SizeBytes(), 0u);
  ASSERT_EQ(job.sink(1).results.size(), 1u);
  EXPECT_EQ(BytesOf(job.sink(1).results[0].payload), BytesOf(payload));
}

TEST(JobCollectiveTest, BucketOfOneNodePassesToAllOnceTheOthersAreReady) {
  TestJob job({1, 2});
  job.Register(kId.bucket, kElems, WireFormat::kFloat32);
  for (uint32_t node = 0; node < 2; ++node) {
    Contribution share{kId, 1, WireFormat::kFloat32, kElems,
                       node == 1 ? PayloadOf(kValues) : Payload()};
    share.collective = {Place::One(1), Place::All(), Fold::kNone};
    ASSERT_TRUE(job.job().Contribute(node, share, Now()).ok());
  }
  for (uint32_t node = 0; node < 2; ++node) {
    ASSERT_EQ(job.sink(node).results.size(), 1u);
    EXPECT_EQ(BytesOf(job.sink(node).results[0].payload), BytesOf(PayloadOf(kValues)));
  }
}

TEST(JobCollectiveTest, OneShotRoundNeedsAGroupAndNoLayout) {
  TestJob job({1, 2, 1});
  const Group group{1, {{0, 1}, {1, 2}}};
  for (const GroupMember& member : group.members) {
    ASSERT_TRUE(job.job().MakeGroup(member.node, group).ok());
  }
  const Collective sum{{}, {}, Fold::kSum};
  for (uint32_t node = 0; node < 2; ++node) {
    ASSERT_TRUE(job.job().Contribute(node, ToGroup(sum, PayloadOf(kValues)), Now()).ok());
  }
  for (uint32_t node = 0; node < 2; ++node) {
    ASSERT_EQ(job.sink(node).results.size(), 1u);
    EXPECT_EQ(BytesOf(job.sink(node).results[0].payload), BytesOf(PayloadOf({2, -4, 6})));
  }
  EXPECT_TRUE(job.sink(2).results.empty());
  EXPECT_EQ(job.HeldBytes(), 0);
}

TEST(JobCollectiveTest, OneShotThatDoesNotFitFailsTheJobSayingWhy) {
  const Collective sum{{}, {}, Fold::kSum};
  const Collective bytes{Place::One(1), Place::All(), Fold::kNone};
  Contribution lossy = ToGroup(sum, PayloadOf(kValues));
  lossy.wire = WireFormat::kInt8;
  Contribution of_no_group = ToGroup(sum, PayloadOf(kValues));
  of_no_group.id.bucket = OneShotsOf(0);
  of_no_group.group = 0;
  const std::vector<float> long_values(kMinChunkBytes / sizeof(float) + 1);
  Contribution too_long = ToGroup(sum, PayloadOf(long_values));
  too_long.elems = long_values.size();
  const std::vector<std::pair<Contribution, std::string>> cases = {
      {ToGroup(sum), "node 0 (host0) gives 0 bytes for 3 elements in fp32 to 'sum from all"},
      {ToGroup(bytes, PayloadOf(kValues)), "node 0 (host0) gives 12 bytes for 3 elements"},
      {lossy, "int8 is for buckets only"},
      {of_no_group, "the job as a whole has buckets only"},
      {too_long, "chunks have at most 4096 bytes, got 4100"},
  };
  for (const auto& [contribution, why] : cases) {
    TestJob job({1, 1});
    ASSERT_TRUE(job.job().MakeGroup(0, {1, {{0, 1}, {1, 1}}}).ok());
    const absl::Status refused = job.job().Contribute(0, contribution, Now());
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr(why));
    EXPECT_EQ(job.sink(1).failures.size(), 1u);
  }
}

TEST(JobCollectiveTest, GroupThatCannotBeFailsTheJobNamingTheNode) {
  const std::vector<std::pair<Group, std::string>> cases = {
      {{1, {{0, 1}, {1, 3}}}, "node 1 (host1) has 2 workers"},
      {{1, {{0, 1}, {2, 1}}}, "the job has 2 nodes"},
      {{1, {{0, 1}}, 65}, "windows have at most 64 chunks"},
  };
  for (const auto& [group, why] : cases) {
    TestJob job({1, 2});
    const absl::Status refused = job.job().MakeGroup(0, group);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                ::testing::AllOf(::testing::HasSubstr("node 0 (host0) declares group 1"),
                                 ::testing::HasSubstr(why)));
    EXPECT_EQ(job.sink(1).failures.size(), 1u);
  }
}

TEST(JobCollectiveTest, WindowsOfGroupsAreReservedWhenTheyAreMade) {
  TestJob job({1, 1});
  const double before = job.Metric("thalweg_shard_memory_reserved_bytes");
  ASSERT_TRUE(job.job().MakeGroup(0, {1, {{0, 1}, {1, 1}}, 10}).ok());
  // Two nodes' chunks, and as many results as one window holds.
  EXPECT_EQ(job.Metric("thalweg_shard_memory_reserved_bytes") - before, 30.0 * kMinChunkBytes);
  TestJob poor({1, 1}, static_cast<uint64_t>(before) - OwnBytes(2) + 29 * kMinChunkBytes);
  EXPECT_EQ(poor.job().MakeGroup(0, {1, {{0, 1}, {1, 1}}, 10}).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace thalweg::job_collective_test
