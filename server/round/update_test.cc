#include "server/round/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "kernels/codec/dense.h"
#include "server/round/round_test_util.h"

namespace thalweg {
namespace {

using Floats = std::vector<float>;

constexpr uint64_t kElems = 5000;

// Two groups, whose tensors end inside of chunks.
const BucketLayout kLayout{.tensors = {{"a", {1001}}, {"b", {7, 100}}, {"c", {3299}}}};
const GroupStep kFirst{.lr = 0.1,
                       .weight_decay = 0.05,
                       .momentum = 0.9,
                       .dampening = 0.1,
                       .beta1 = 0.9,
                       .beta2 = 0.99,
                       .eps = 1e-6};
const GroupStep kSecond{.lr = 0.02, .momentum = 0.5, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-8};

UpdateRule Rule(Optimizer optimizer, WireFormat down = WireFormat::kFloat32) {
  UpdateRule rule;
  rule.optimizer = optimizer;
  rule.decoupled = optimizer == Optimizer::kAdam;
  rule.groups = {0, 1, 0};
  rule.down = down;
  return rule;
}

const GroupStep& GroupAt(uint64_t elem) { return elem >= 1001 && elem < 1701 ? kSecond : kFirst; }

Floats Random(uint64_t elems, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Floats values(elems);
  for (float& value : values) value = normal(random);
  return values;
}

RoundResult Mean(const float* values, uint64_t elems, uint64_t round) {
  RoundResult mean;
  mean.id = {{3, 0, 0}, 1, round};
  mean.elems = elems;
  const auto copy = std::make_shared<Floats>(values, values + elems);
  mean.payload = Payload(std::as_bytes(std::span(*copy)), copy);
  return mean;
}

Floats Decoded(const RoundResult& result) {
  Floats values(result.elems);
  EXPECT_TRUE(DecodePayload(result.payload, DTypeOf(result.wire), DType::kFloat32, result.elems,
                            values.data())
                  .ok());
  return values;
}

// Returns the plan of a bucket of kElems elements with chunks of these sizes.
ChunkPlan PlanOf(const std::vector<uint64_t>& chunks) {
  std::vector<uint64_t> begins = {0};
  for (const uint64_t elems : chunks) begins.push_back(begins.back() + elems);
  ChunkPlan plan{kElems};
  plan.begins = std::make_shared<const std::vector<uint64_t>>(std::move(begins));
  return plan;
}

// Trains in chunks of these sizes for `steps` steps; returns what workers get last.
Floats Train(const UpdateRule& rule, const std::vector<uint64_t>& chunks, int steps) {
  const Floats start = Random(kElems, 1);
  const ChunkPlan plan = PlanOf(chunks);
  Floats last(kElems);
  uint64_t begin = 0;
  size_t chunk = 0;
  for (const uint64_t elems : chunks) {
    ChunkState state(elems);
    {
      MutexLock lock(state.mutex);
      state.weights.params.assign(start.begin() + begin, start.begin() + begin + elems);
    }
    const auto pieces = PiecesOf(kLayout, rule, plan)[chunk++];
    for (int step = 1; step <= steps; ++step) {
      const Floats gradient = Random(kElems, 100 + step);
      const auto result = UpdateWeights(Mean(gradient.data() + begin, elems, step), rule, pieces,
                                        {{kFirst, kSecond}}, state);
      EXPECT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->result.wire, rule.down);
      const Floats values = Decoded(result->result);
      std::copy(values.begin(), values.end(), last.begin() + begin);
    }
    begin += elems;
  }
  EXPECT_EQ(begin, kElems);
  return last;
}

// The formulas as torch's documentation states them, in double.
std::vector<double> Reference(Optimizer optimizer, int steps) {
  const Floats start = Random(kElems, 1);
  std::vector<double> params(start.begin(), start.end()), first(kElems), second(kElems);
  for (int step = 1; step <= steps; ++step) {
    const Floats gradient = Random(kElems, 100 + step);
    for (uint64_t i = 0; i < kElems; ++i) {
      const GroupStep& g = GroupAt(i);
      double grad = gradient[i];
      if (optimizer == Optimizer::kAdam) {
        params[i] *= 1 - g.lr * g.weight_decay;
        first[i] = g.beta1 * first[i] + (1 - g.beta1) * grad;
        second[i] = g.beta2 * second[i] + (1 - g.beta2) * grad * grad;
        const double mean = first[i] / (1 - std::pow(g.beta1, step));
        const double variance = second[i] / (1 - std::pow(g.beta2, step));
        params[i] -= g.lr * mean / (std::sqrt(variance) + g.eps);
      } else {
        grad += g.weight_decay * params[i];
        first[i] = step == 1 ? grad : g.momentum * first[i] + (1 - g.dampening) * grad;
        params[i] -= g.lr * first[i];
      }
    }
  }
  return params;
}

class UpdateWeightsTest : public ::testing::TestWithParam<Optimizer> {};
INSTANTIATE_TEST_SUITE_P(Optimizers, UpdateWeightsTest,
                         ::testing::Values(Optimizer::kSgd, Optimizer::kAdam));

TEST_P(UpdateWeightsTest, StepsAreThoseOfTheFormulas) {
  constexpr int kSteps = 6;
  const Floats got = Train(Rule(GetParam()), {kElems}, kSteps);
  const std::vector<double> expected = Reference(GetParam(), kSteps);
  for (uint64_t i = 0; i < kElems; ++i) {
    // Some ten roundings a step of values below 8, each carried on by at most a factor near 1.
    ASSERT_NEAR(got[i], expected[i], kSteps * 10 * 8 * 6e-8) << i;
  }
}

TEST_P(UpdateWeightsTest, ChunksDoNotChangeABit) {
  EXPECT_EQ(Train(Rule(GetParam()), {kElems}, 3),
            Train(Rule(GetParam()), {1, 999, 2, 700, 3298}, 3));
}

TEST_P(UpdateWeightsTest, WeightsThatAreSentInFewerBitsStayWhole) {
  for (const WireFormat down : {WireFormat::kFloat16, WireFormat::kBFloat16}) {
    const Floats whole = Train(Rule(GetParam()), {kElems}, 5);
    const Floats sent = Train(Rule(GetParam(), down), {kElems}, 5);
    const float eps = down == WireFormat::kFloat16 ? 0x1p-11f : 0x1p-8f;
    for (uint64_t i = 0; i < kElems; ++i) {
      // Rounded once, at the end: an error of each step would add up.
      ASSERT_LE(std::abs(sent[i] - whole[i]), eps * std::abs(whole[i]) + 0x1p-24f) << i;
    }
  }
}

TEST(WeightsTest, ShardWithoutWeightsRefuses) {
  ChunkState state(10);
  const Floats gradient(10);
  const UpdateRule rule = Rule(Optimizer::kAdam);
  const std::vector<UpdatePiece> pieces = {{{0, 10}, 0}};
  const auto result =
      UpdateWeights(Mean(gradient.data(), 10, 1), rule, pieces, {{kFirst, kSecond}}, state);
  EXPECT_EQ(result.status(), absl::FailedPreconditionError(
                                 "bucket 3 round 1 chunk 1: the shard has no weights to update"));
}

TEST(WeightsTest, PiecesAreTheTensorsWhereTheChunkIs) {
  const UpdateRule rule = Rule(Optimizer::kSgd);
  using Pieces = std::vector<std::vector<UpdatePiece>>;
  const Pieces within = {{{{0, 1000}, 0}}, {{{0, 1}, 0}, {{1, 701}, 1}, {{701, 1000}, 0}}};
  const Pieces all = PiecesOf(kLayout, rule, PlanOf({1000, 1000, kElems - 2000}));
  EXPECT_EQ(Pieces(all.begin(), all.begin() + 2), within);
  const Pieces exact = PiecesOf(kLayout, rule, PlanOf({1001, 700, kElems - 1701}));
  EXPECT_EQ(exact[0], (std::vector<UpdatePiece>{{{0, 1001}, 0}}));
  EXPECT_EQ(exact[1], (std::vector<UpdatePiece>{{{0, 700}, 1}}));
}

}  // namespace
}  // namespace thalweg
