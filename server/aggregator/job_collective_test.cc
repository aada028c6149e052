#include <gtest/gtest.h>

#include "server/aggregator/job_test_util.h"

namespace thalweg {
namespace {

constexpr uint64_t kElems = 3;
constexpr RoundId kId{{0, 0}, 0, 1};

TEST(JobCollectiveTest, NodesThatGetNoResultGetAReceipt) {
  TestJob job({1, 2});
  job.Register(kId.bucket, kElems, WireFormat::kFloat32);
  const std::vector<float> values = {1, -2, 3};
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  const Bytes payload(bytes, bytes + kElems * sizeof(float));
  for (uint32_t node = 0; node < 2; ++node) {
    Contribution share{kId, 1, WireFormat::kFloat32, kElems, Split(payload, {})};
    share.collective = {Place::All(), Place::One(1), Fold::kMax};
    ASSERT_TRUE(job.job().Contribute(node, share, Now()).ok());
  }
  ASSERT_EQ(job.sink(0).results.size(), 1u);
  EXPECT_EQ(job.sink(0).results[0].id, kId);
  EXPECT_EQ(job.sink(0).results[0].payload.SizeBytes(), 0u);
  ASSERT_EQ(job.sink(1).results.size(), 1u);
  EXPECT_EQ(BytesOf(job.sink(1).results[0].payload), payload);
}

}  // namespace
}  // namespace thalweg
