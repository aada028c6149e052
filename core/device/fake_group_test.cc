#include "core/device/fake_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

namespace thalweg::fake_group_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kElems = 3;

class FakeGroupTest : public ::testing::Test {
 protected:
  FakeGroupTest() {
    for (const auto& gpu : gpus_) {
      EXPECT_TRUE(gpu->BindThread().ok());
      memory_.push_back(gpu->Allocate(4096));
      members_.push_back({memory_.back().data(), *gpu->CreateStream()});
    }
  }
  template <class T>
  void Put(size_t member, std::vector<T> values) {
    std::byte* const inside = gpus_[member]->Inside(memory_[member]).data();
    gpus_[member]->Run(members_[member].stream, [inside, values] {
      std::memcpy(inside, values.data(), values.size() * sizeof(T));
    });
  }
  template <class T>
  std::vector<T> Get(size_t member) {
    std::vector<T> values(kElems);
    std::memcpy(values.data(), gpus_[member]->Inside(memory_[member]).data(), kElems * sizeof(T));
    return values;
  }
  void Settle() {
    for (int i = 0; i < 3; ++i) {  // one device's progress may let another continue
      for (const auto& gpu : gpus_) gpu->Settle();
    }
  }

  std::vector<std::shared_ptr<FakeRuntime>> gpus_ = {std::make_shared<FakeRuntime>(true, 1),
                                                     std::make_shared<FakeRuntime>(true, 2)};
  std::vector<std::span<std::byte>> memory_;
  std::vector<DeviceGroup::Member> members_;
  FakeGroup group_{{gpus_[0].get(), gpus_[1].get()}};
};

TEST_F(FakeGroupTest, SumIsAtTheRootAndBroadcastTakesItToAll) {
  Put<float>(0, {1, 2, 3});
  Put<float>(1, {10, 20, 30});
  ASSERT_TRUE(group_.Reduce(members_, 1, DType::kFloat32, kElems).ok());
  Settle();
  EXPECT_THAT(Get<float>(0), ElementsAre(1, 2, 3));
  EXPECT_THAT(Get<float>(1), ElementsAre(11, 22, 33));
  ASSERT_TRUE(group_.Broadcast(members_, 1, kElems * sizeof(float)).ok());
  Settle();
  EXPECT_THAT(Get<float>(0), ElementsAre(11, 22, 33));
  EXPECT_THAT(group_.roots(), ElementsAre(1, 1));
  EXPECT_THAT(group_.violations(), IsEmpty());
}

// IEEE 754's fp16: 2048 + 1 is a tie that goes to the even 2048, 65504 the greatest value, 2^-24
// the least. bf16 is the upper half of a float: 256 + 1 is a tie, too.
TEST_F(FakeGroupTest, SixteenBitSumsAreRoundedToNearestEven) {
  Put<uint16_t>(0, {0x6800, 0x7bff, 0x0001});  // 2048, 65504, 2^-24
  Put<uint16_t>(1, {0x3c00, 0x5000, 0x0001});  // 1, 32, 2^-24
  ASSERT_TRUE(group_.Reduce(members_, 0, DType::kFloat16, kElems).ok());
  Settle();
  EXPECT_THAT(Get<uint16_t>(0), ElementsAre(0x6800, 0x7c00, 0x0002));
  Put<uint16_t>(0, {0x4380, 0xc380, 0x3f80});  // 256, -256, 1
  Put<uint16_t>(1, {0x3f80, 0x4000, 0xbf80});  // 1, 2, -1
  ASSERT_TRUE(group_.Reduce(members_, 0, DType::kBFloat16, kElems).ok());
  Settle();
  EXPECT_THAT(Get<uint16_t>(0), ElementsAre(0x4380, 0xc37e, 0x0000));
}

TEST_F(FakeGroupTest, NothingBeginsBeforeAllMembersAreThere) {
  gpus_[1]->Hold(members_[1].stream);
  Put<float>(0, {1, 2, 3});
  Put<float>(1, {1, 1, 1});
  ASSERT_TRUE(group_.Reduce(members_, 0, DType::kFloat32, kElems).ok());
  bool went_on = false;
  gpus_[0]->Run(members_[0].stream, [&went_on] { went_on = true; });
  Settle();
  EXPECT_FALSE(went_on);
  EXPECT_THAT(Get<float>(0), ElementsAre(1, 2, 3));
  gpus_[1]->Release(members_[1].stream);
  Settle();
  EXPECT_TRUE(went_on);
  EXPECT_THAT(Get<float>(0), ElementsAre(2, 3, 4));
}

TEST_F(FakeGroupTest, WhatHangsEndsWhenItIsAborted) {
  group_.Hang();
  Put<float>(0, {1, 2, 3});
  ASSERT_TRUE(group_.Reduce(members_, 0, DType::kFloat32, kElems).ok());
  bool went_on = false;
  gpus_[0]->Run(members_[0].stream, [&went_on] { went_on = true; });
  Settle();
  EXPECT_FALSE(went_on);
  EXPECT_TRUE(group_.Check().ok());
  group_.Fail(absl::DeadlineExceededError("late"));
  Settle();
  EXPECT_FALSE(went_on);
  group_.Abort();
  Settle();
  EXPECT_TRUE(went_on);
  EXPECT_THAT(Get<float>(0), ElementsAre(1, 2, 3));
  EXPECT_EQ(group_.Check().message(), "late");
  EXPECT_EQ(group_.Broadcast(members_, 0, 1).message(), "late");
}

TEST_F(FakeGroupTest, MissingMemberAndFreedMemoryAreViolations) {
  EXPECT_FALSE(group_.Broadcast(std::span(members_).first(1), 0, 1).ok());
  gpus_[1]->Hold(members_[1].stream);
  ASSERT_TRUE(group_.Broadcast(members_, 0, 1).ok());
  gpus_[1]->Free(memory_[1]);
  gpus_[1]->Release(members_[1].stream);
  Settle();
  EXPECT_THAT(group_.violations(), ElementsAre(HasSubstr("all members"), HasSubstr("freed")));
}

}  // namespace
}  // namespace thalweg::fake_group_test
