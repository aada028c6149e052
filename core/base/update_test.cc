#include "core/base/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace thalweg::update_test {
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

TEST(UpdateTest, ChunksOfUpdatedBucketsBeginAtGranulesAndHaveEveryGranuleOnce) {
  const BucketLayout layouts[] = {
      kLayout,
      {.tensors = {}},
      {.tensors = {{"a", {100'000}}}},
      {.tensors = {{"a", {5000}}, {"none", {0}}, {"b", {4096}}, {"c", {1}}, {"d", {70'001}}}},
  };
  for (const BucketLayout& layout : layouts) {
    for (const uint32_t shards : {1U, 3U}) {
      const ChunkPlan plan = PlanOfUpdated(layout, WireFormat::kFloat32, 64 << 10, shards);
      uint64_t granules = 0;
      uint64_t end = 0;
      for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
        const uint64_t begin = plan.Begin(chunk);
        EXPECT_EQ(begin, end);
        EXPECT_GT(plan.Elems(chunk), 0U);
        EXPECT_EQ(plan.ChunkOf(begin), chunk);
        end = plan.Begin(chunk + 1);
        granules += GranulesIn(layout, begin, end);
        // Counted up to the chunk and from it on, no granule is counted twice.
        EXPECT_EQ(GranulesIn(layout, 0, begin) + GranulesIn(layout, begin, layout.Elems()),
                  GranulesIn(layout, 0, layout.Elems()));
      }
      EXPECT_EQ(end, layout.Elems());
      EXPECT_EQ(granules, GranulesIn(layout, 0, layout.Elems()));
    }
  }
  EXPECT_EQ(GranulesIn(layouts[3], 0, layouts[3].Elems()), 2U + 1 + 1 + 18);
}

TEST(UpdateTest, StepsWithTheSameSquaresAreEqualAlsoWhereTheseAreNoNumbers) {
  UpdateStep step = Step();
  step.grad_squares = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(step, step);
  EXPECT_TRUE(Validate(step).ok());
  EXPECT_NE(step, Step());
  UpdateStep trusted = Step();
  trusted.groups[1].trust_ratio = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(trusted, trusted);
  EXPECT_TRUE(Validate(trusted).ok());
  EXPECT_NE(trusted, Step());
  UpdateStep measuring = Step();
  measuring.measures = true;
  EXPECT_NE(measuring, Step());
  UpdateStep ending = Step();
  ending.waits_for_all = true;
  EXPECT_NE(ending, Step());
  UpdateStep clipped = Step();
  clipped.max_grad_norm = 1;
  EXPECT_NE(clipped, Step());
  clipped.grad_scale = 0;
  EXPECT_FALSE(Validate(clipped).ok());
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
  UpdateRule lamb = AdamW();
  lamb.optimizer = Optimizer::kLamb;
  lamb.commits = true;
  EXPECT_TRUE(Validate(lamb, kLayout).ok());
  EXPECT_EQ(ToString(lamb), "lamb (decoupled), in three rounds, weights in fp32, 2 groups");
  sgd.ahead = 8;
  EXPECT_TRUE(Validate(sgd, kLayout).ok());
  EXPECT_EQ(ToString(sgd), "sgd (nesterov), nodes up to 8 rounds apart, weights in bf16, 1 group");
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
            "update: sgd has no decoupled weight decay");
  EXPECT_EQ(why([](UpdateRule& r) { r.nesterov = true; }), "update: adam has no Nesterov");
  EXPECT_EQ(why([](UpdateRule& r) { r.optimizer = Optimizer::kLamb; }),
            "update: lamb needs the norms of whole tensors: its update commits");
  EXPECT_EQ(why([](UpdateRule& r) { r.groups[0] = 1 << 20; }),
            "update: at most 4096 groups, got number 1048576");
  EXPECT_EQ(why([](UpdateRule& r) { r.groups[0] = UINT32_MAX; }),
            "update: at most 4096 groups, got number 4294967295");
  EXPECT_EQ(
      why([](UpdateRule& r) { r.down = WireFormat::kTopK; }),
      "update: weights cross the network in floats of 16 or 32 bits, or in blocks, not in topk");
  EXPECT_EQ(why([](UpdateRule& r) {
              r.down = WireFormat::kInt8;
              r.alone = true;
            }),
            "update: differences in int8 need all nodes in the same round");
  EXPECT_EQ(why([](UpdateRule& r) { r.ahead = 65; }),
            "update: nodes can be at most 64 rounds apart, not 65");
  EXPECT_EQ(why([](UpdateRule& r) { r.delay_aware = true; }),
            "update: nodes that wait for each other have no delays");
  const char* const two_ways =
      "update: nodes wait for each other in one way: expected one of two "
      "rounds, some rounds apart, each by itself, or a quorum";
  EXPECT_EQ(why([](UpdateRule& r) { r.alone = r.commits = true; }), two_ways);
  EXPECT_EQ(why([](UpdateRule& r) {
              r.alone = true;
              r.ahead = 1;
            }),
            two_ways);
  EXPECT_EQ(why([](UpdateRule& r) {
              r.quorum = 2;
              r.ahead = 1;
            }),
            two_ways);
  EXPECT_EQ(why([](UpdateRule& r) { r.grace_ms = 1; }),
            "update: only nodes that a quorum does not wait for are late");
}

TEST(UpdateTest, OnlyWeightsInFloatsOf32BitsComeAsDifferences) {
  UpdateRule rule = AdamW();
  rule.down = WireFormat::kOneBit;
  EXPECT_TRUE(Validate(rule, kLayout).ok());
  BucketLayout half = kLayout;
  half.dtype = DType::kBFloat16;
  EXPECT_EQ(Validate(rule, half).message(),
            "update: weights in bf16 do not come as differences in onebit, which need fp32");
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
  EXPECT_EQ(why([](UpdateStep& s) { s.groups[1].trust_ratio = -1; }),
            "update: group 1 has a negative setting");
  EXPECT_EQ(why([](UpdateStep& s) { s.measures = true; }), "update: adam has nothing to measure");
  const char* const no_quorum =
      "update: only a round that waits for all, where others wait for a quorum, takes nothing";
  EXPECT_EQ(why([](UpdateStep& s) { s.waits_for_all = true; }), no_quorum);
  UpdateRule quorum = AdamW();
  quorum.quorum = 2;
  UpdateStep ends = Step();
  ends.gives_nothing = true;
  EXPECT_EQ(CheckFits(ends, quorum).message(), no_quorum);
  ends.waits_for_all = true;
  EXPECT_TRUE(CheckFits(ends, quorum).ok());
  UpdateRule nesterov;
  nesterov.nesterov = true;
  nesterov.groups = {0, 0};
  EXPECT_EQ(CheckFits(UpdateStep{{GroupStep{.lr = 1}}}, nesterov).message(),
            "update: group 0: Nesterov needs a momentum and no dampening");
}

}  // namespace
}  // namespace thalweg::update_test
