#include "core/base/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace thalweg {
namespace {

const BucketLayout kLayout{.tensors = {{"w", {4, 5}}, {"b", {5}}}};

UpdateRule AdamW() {
  UpdateRule rule;
  rule.optimizer = Optimizer::kAdam;
  rule.decoupled = true;
  rule.groups = {0, 1};
  return rule;
}

UpdateStep Step() {
  const GroupStep group{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
  return {{group, group}};
}

TEST(UpdateTest, RuleThatFitsTheBucketIsTakenAndNamed) {
  EXPECT_TRUE(Validate(AdamW(), kLayout).ok());
  EXPECT_EQ(ToString(AdamW()), "adam (decoupled), weights in fp32, 2 groups");
  UpdateRule sgd;
  sgd.nesterov = true;
  sgd.groups = {0, 0};
  sgd.down = WireFormat::kBFloat16;
  EXPECT_TRUE(Validate(sgd, kLayout).ok());
  EXPECT_EQ(ToString(sgd), "sgd (nesterov), weights in bf16, 1 group");
}

TEST(UpdateTest, RuleThatCannotBeIsRefusedWithTheReason) {
  const auto why = [](auto change) {
    UpdateRule rule = AdamW();
    change(rule);
    const absl::Status status = Validate(rule, kLayout);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(why([](UpdateRule& r) { r.groups = {0}; }),
            "update: expected groups of 2 tensors, got 1");
  EXPECT_EQ(why([](UpdateRule& r) { r.optimizer = static_cast<Optimizer>(9); }),
            "update: there is no optimizer 9");
  EXPECT_EQ(why([](UpdateRule& r) { r.optimizer = Optimizer::kSgd; }),
            "update: SGD has no decoupled weight decay");
  EXPECT_EQ(why([](UpdateRule& r) { r.nesterov = true; }), "update: Adam has no Nesterov");
  EXPECT_EQ(why([](UpdateRule& r) { r.groups[0] = 1 << 20; }),
            "update: at most 4096 groups, got number 1048576");
  EXPECT_EQ(why([](UpdateRule& r) { r.down = WireFormat::kInt8; }),
            "update: weights cross the network in floats of 16 or 32 bits, not in int8");
}

TEST(UpdateTest, StepThatDoesNotFitTheRuleIsRefusedWithTheReason) {
  const auto why = [](auto change) {
    UpdateStep step = Step();
    change(step);
    absl::Status status = Validate(step);
    if (status.ok()) status = CheckFits(step, AdamW());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_TRUE(Validate(Step()).ok() && CheckFits(Step(), AdamW()).ok());
  EXPECT_EQ(why([](UpdateStep& s) { s.groups.pop_back(); }),
            "update: expected settings of 2 groups, got 1");
  EXPECT_EQ(why([](UpdateStep& s) { s.groups[1].lr = std::nan(""); }),
            "update: group 1 has a setting of nan");
  EXPECT_EQ(why([](UpdateStep& s) { s.groups[1].lr = -1; }),
            "update: group 1 has a negative setting");
  EXPECT_EQ(why([](UpdateStep& s) { s.groups[0].beta2 = 1; }),
            "update: group 0: expected betas from 0 to below 1, got 1");
  UpdateRule nesterov;
  nesterov.nesterov = true;
  nesterov.groups = {0, 0};
  EXPECT_EQ(CheckFits(UpdateStep{{GroupStep{.lr = 1}}}, nesterov).message(),
            "update: group 0: Nesterov needs a momentum and no dampening");
}

}  // namespace
}  // namespace thalweg
