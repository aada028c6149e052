#include "server/sidecar/bucket/job_compression.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "server/base/metrics.h"

namespace thalweg::job_compression_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kNodes = 4, kShards = 4;

// Costs and a round trip that no power of two divides.
Terms Measured(size_t candidates) {
  Terms terms;
  terms.link = {1.25e7 / 3, std::chrono::nanoseconds(333'333)};
  for (size_t i = 0; i < candidates; ++i) {
    const double cost = 1e-9 / static_cast<double>(3 + i);
    terms.costs.push_back({cost, cost / 7, cost / 11});
  }
  return terms;
}

class JobCompressionTest : public ::testing::Test {
 protected:
  JobCompression Make(const std::string& codec) {
    return {"job", *CodecPolicy::Parse(codec), kNodes, kShards, metrics_};
  }

  MetricRegistry registry_;
  SidecarMetrics metrics_{registry_};
};

TEST_F(JobCompressionTest, NextProcessChoosesWhatTheDeadOneHadChosen) {
  JobCompression dead = Make("auto");
  dead.Agree(Measured(dead.candidates().size()), {.seconds_per_byte = 1.5e-7 / 3});
  JobCompression next = Make("auto");
  ASSERT_TRUE(next.Restore(dead.measured(), 0).ok());
  EXPECT_EQ(next.measured(), dead.measured());
  for (const int64_t rows : {1, 20, 300, 4000}) {
    const BucketLayout layout{DType::kFloat32, {{"w", {rows, 500}}, {"b", {rows}}}};
    EXPECT_EQ(next.Choose({0, 0}, layout), dead.Choose({0, 0}, layout)) << rows;
  }
  // Without numbers all is free, so that nothing but fp32 would be chosen.
  const BucketLayout large{DType::kFloat32, {{"w", {4000, 500}}}};
  EXPECT_NE(next.Choose({0, 0}, large), 0u);
}

TEST_F(JobCompressionTest, OtherCodecsNeedNoNumbers) {
  JobCompression dead = Make("int8");
  dead.Agree(Measured(0), {.seconds_per_byte = 1e-8});
  EXPECT_THAT(dead.measured(), IsEmpty());
  EXPECT_TRUE(Make("int8").Restore({}, 7).ok());
}

TEST_F(JobCompressionTest, NothingIsShownOfAJobThatHasEnded) {
  {
    JobCompression job = Make("int8");
    ASSERT_TRUE(job.Restore({}, 7).ok());
    metrics_.residual_norm.Show(3, &job);
    metrics_.compression_error.Show(0.5, &job);
    EXPECT_EQ(metrics_.compressed_since.Value(), 7);
    Make("fp32");  // it has nothing to show, and takes nothing away
    EXPECT_EQ(metrics_.compressed_since.Value(), 7);
  }
  EXPECT_EQ(metrics_.compressed_since.Value(), 0);
  EXPECT_EQ(metrics_.residual_norm.Value(), 0);
  EXPECT_EQ(metrics_.compression_error.Value(), 0);
}

TEST_F(JobCompressionTest, NumbersOfAnotherJobAreRefused) {
  JobCompression dead = Make("auto");
  dead.Agree(Measured(dead.candidates().size()), {});
  const std::vector<double> right = dead.measured();
  std::vector<double> fewer = right, negative = right, none = right;
  fewer.pop_back();
  negative.back() = -1;
  none.front() = std::numeric_limits<double>::quiet_NaN();
  for (const auto& wrong : {fewer, negative, none, std::vector<double>()}) {
    const absl::Status refused = Make("auto").Restore(wrong, 0);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("numbers by which auto chooses"));
  }
  EXPECT_FALSE(Make("fp16").Restore(right, 0).ok());
}

}  // namespace
}  // namespace thalweg::job_compression_test
