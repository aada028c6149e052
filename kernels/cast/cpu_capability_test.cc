#include "kernels/cast/cpu_capability.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hwy/highway.h"

namespace thalweg::cpu_capability_test {
namespace {

class CpuCapabilityTest : public testing::Test {
 protected:
  ~CpuCapabilityTest() override { EXPECT_TRUE(LimitCpuCapability("").ok()); }
};

TEST_F(CpuCapabilityTest, NothingSetLeavesAllTargets) {
  const auto before = hwy::SupportedAndGeneratedTargets();
  ASSERT_TRUE(LimitCpuCapability("").ok());
  EXPECT_EQ(hwy::SupportedAndGeneratedTargets(), before);
}

TEST_F(CpuCapabilityTest, DefaultLeavesOnlyWhatEveryProcessorHas) {
  ASSERT_TRUE(LimitCpuCapability("default").ok());
  EXPECT_THAT(hwy::SupportedAndGeneratedTargets(), testing::ElementsAre(HWY_STATIC_TARGET));
  EXPECT_EQ(CpuCapability(), hwy::TargetName(HWY_STATIC_TARGET));
}

TEST_F(CpuCapabilityTest, Avx2LeavesNothingNewer) {
  if (!HWY_ARCH_X86) GTEST_SKIP() << "this processor is not x86";
  ASSERT_TRUE(LimitCpuCapability("avx2").ok());
  EXPECT_THAT(hwy::SupportedAndGeneratedTargets(), testing::Each(testing::Ge(HWY_AVX2)));
}

TEST_F(CpuCapabilityTest, UnknownNameIsRefusedAndChangesNothing) {
  const auto before = hwy::SupportedAndGeneratedTargets();
  const absl::Status status = LimitCpuCapability("avx3");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("'avx3'"));
  EXPECT_EQ(hwy::SupportedAndGeneratedTargets(), before);
}

}  // namespace
}  // namespace thalweg::cpu_capability_test
