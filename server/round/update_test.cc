#include "server/round/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "kernels/codec/dense.h"
#include "kernels/codec/lossy.h"
#include "server/round/round_test_util.h"

namespace thalweg::update_test {
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
  rule.decoupled = optimizer != Optimizer::kSgd;
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

// A node that adds up the differences that it gets.
struct Receiver {
  Floats weights;

  void Take(const RoundResult& result) {
    if (IsDense(result.wire)) {
      weights = Decoded(result);
      return;
    }
    Floats difference(result.elems);
    ASSERT_TRUE(
        DecodeLossy(result.payload, result.wire, DType::kFloat32, result.elems, difference.data())
            .ok());
    for (uint64_t i = 0; i < result.elems; ++i) weights[i] += difference[i];
  }
};

double DistanceOf(const Floats& a, const Floats& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return std::sqrt(squares);
}

class DifferencesTest : public ::testing::TestWithParam<WireFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, DifferencesTest,
                         ::testing::Values(WireFormat::kInt8, WireFormat::kOneBit),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(DifferencesTest, AddUpToTheWeightsSinceWhatOneLeavesOutComesWithTheNext) {
  const UpdateRule rule = Rule(Optimizer::kSgd, GetParam());
  const auto pieces = PiecesOf(kLayout, rule, PlanOf({kElems}))[0];
  ChunkState state(kElems);
  {
    MutexLock lock(state.mutex);
    state.weights.params = Random(kElems, 1);
  }
  Receiver node;
  GroupStep moving = kFirst, resting = kFirst;
  resting.lr = 0;
  double after_moving = 0, distance = 0;
  for (uint64_t step = 1; step <= 60; ++step) {
    const Floats gradient = Random(kElems, 100 + step);
    const GroupStep& now = step <= 20 ? moving : resting;
    const auto result =
        UpdateWeights(Mean(gradient.data(), kElems, step), rule, pieces, {{now, now}}, state);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->result.wire, step == 1 ? WireFormat::kFloat32 : GetParam());
    node.Take(result->result);
    MutexLock lock(state.mutex);
    ASSERT_EQ(node.weights, state.sent) << "step " << step;
    if (step == 1) EXPECT_EQ(node.weights, state.weights.params);
    const double before = std::exchange(distance, DistanceOf(node.weights, state.weights.params));
    if (step == 20) after_moving = distance;
    // What is encoded is never more than what was left out.
    if (step > 20) EXPECT_LE(distance, before) << "step " << step;
  }
  // Weights that rest are reached: a block of int8 comes 250 times closer with each difference, but
  // signs with one scale slowly, once a few elements are what is left.
  const double part = GetParam() == WireFormat::kInt8 ? 1e-3 : 0.5;
  MutexLock lock(state.mutex);
  EXPECT_LT(DistanceOf(node.weights, state.weights.params), part * after_moving);
}

TEST_P(DifferencesTest, WeightsThatHaveBeenWrittenComeWhole) {
  const UpdateRule rule = Rule(Optimizer::kSgd, GetParam());
  const auto pieces = PiecesOf(kLayout, rule, PlanOf({kElems}))[0];
  ChunkState state(kElems);
  const Floats zeros(kElems);
  for (uint64_t step = 1; step <= 4; ++step) {
    if (step % 2 == 1) {
      MutexLock lock(state.mutex);
      state.weights.params = Random(kElems, step);
      state.sent.clear();
    }
    const auto result =
        UpdateWeights(Mean(zeros.data(), kElems, step), rule, pieces, {{kFirst, kSecond}}, state);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->result.wire, step % 2 == 1 ? WireFormat::kFloat32 : GetParam());
  }
}

TEST(WeightsTest, MomentumThatBeginsLaterBeginsWithTheWholeGradient) {
  ChunkState state(1);
  {
    MutexLock lock(state.mutex);
    state.weights.params = {0};
  }
  const float gradient = 1;
  GroupStep group{.lr = 1, .dampening = 0.25};
  // torch's buffer is 1, and then 0.5 + 0.75.
  for (const auto& [momentum, expected] : {std::pair(0.0, -1.0f), {0.5, -2.0f}, {0.5, -3.25f}}) {
    group.momentum = momentum;
    ASSERT_TRUE(UpdateWeights(Mean(&gradient, 1, 1), Rule(Optimizer::kSgd), {{{{0, 1}, 0}}},
                              {{group, group}}, state)
                    .ok());
    MutexLock lock(state.mutex);
    EXPECT_EQ(state.weights.params[0], expected);
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

// Does one step of LAMB in chunks of these sizes; returns the weights. The ratios of the tensors
// are those of their norms.
Floats LambStep(const std::vector<uint64_t>& chunks) {
  UpdateRule rule = Rule(Optimizer::kLamb);
  rule.commits = true;
  rule.groups = {0, 1, 2};
  UpdateStep step{{kFirst, kSecond, kFirst}, 4};
  step.measures = true;
  const Floats start = Random(kElems, 1);
  const Floats gradient = Random(kElems, 2);
  std::vector<std::unique_ptr<ChunkState>> states;
  const std::vector<std::vector<UpdatePiece>> pieces = PiecesOf(kLayout, rule, PlanOf(chunks));
  double sums[3][2] = {};
  uint64_t begin = 0;
  for (const uint64_t elems : chunks) {
    ChunkState& state = *states.emplace_back(std::make_unique<ChunkState>(elems));
    {
      MutexLock lock(state.mutex);
      state.weights.params.assign(start.begin() + begin, start.begin() + begin + elems);
    }
    const std::vector<UpdatePiece>& own = pieces[states.size() - 1];
    const RoundResult mean = Mean(gradient.data() + begin, elems, 1);
    EXPECT_TRUE(KeepMean(mean, own, state).ok());
    const auto measured = UpdateWeights(mean, rule, own, step, state);
    EXPECT_TRUE(measured.ok()) << measured.status();
    std::vector<double> norms(measured->result.elems);
    EXPECT_TRUE(DecodePayload(measured->result.payload, DType::kFloat64, DType::kFloat64,
                              norms.size(), norms.data())
                    .ok());
    EXPECT_EQ(norms.size(), 2 * own.size());  // each tensor is one granule
    for (size_t i = 0; i < own.size(); ++i) {
      sums[own[i].group][0] += norms[i];
      sums[own[i].group][1] += norms[own.size() + i];
    }
    begin += elems;
  }
  step.measures = false;
  for (int i = 0; i < 3; ++i) step.groups[i].trust_ratio = std::sqrt(sums[i][0] / sums[i][1]);
  Floats weights;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto pulled =
        UpdateWeights(Mean(gradient.data(), chunks[i], 2), rule, pieces[i], step, *states[i]);
    EXPECT_TRUE(pulled.ok()) << pulled.status();
    const Floats values = Decoded(pulled->result);
    weights.insert(weights.end(), values.begin(), values.end());
  }
  return weights;
}

TEST(LambTest, StepIsThatOfTheFormulasHoweverTensorsAreCutBetweenThem) {
  const Floats got = LambStep({kElems});
  EXPECT_EQ(got, LambStep({1001, 700, 3299}));
  const Floats start = Random(kElems, 1);
  const Floats gradient = Random(kElems, 2);
  const uint64_t ends[] = {0, 1001, 1701, kElems};
  for (int tensor = 0; tensor < 3; ++tensor) {
    const GroupStep& g = tensor == 1 ? kSecond : kFirst;
    std::vector<double> update;
    double of_weights = 0, of_update = 0;
    for (uint64_t i = ends[tensor]; i < ends[tensor + 1]; ++i) {
      // In the first step both moments are, without their bias, the gradient and its square.
      const double grad = gradient[i] / 4;
      update.push_back(grad / (std::abs(grad) + g.eps) + g.weight_decay * start[i]);
      of_weights += double{start[i]} * start[i];
      of_update += update.back() * update.back();
    }
    const double rate = g.lr * std::sqrt(of_weights / of_update);
    for (uint64_t i = ends[tensor]; i < ends[tensor + 1]; ++i) {
      const double expected = start[i] - rate * update[i - ends[tensor]];
      // Some ten roundings of values below 8, of which the update's is multiplied by the rate.
      ASSERT_NEAR(got[i], expected, 10 * 8 * 6e-8) << i;
    }
  }
}

TEST(LambTest, RoundsOutOfTheirOrderAreRefused) {
  UpdateRule rule = Rule(Optimizer::kLamb);
  rule.commits = true;
  UpdateStep step{{kFirst, kSecond}};
  const std::vector<UpdatePiece> pieces = {{{0, 10}, 0}};
  const Floats gradient = Random(10, 2);
  const RoundResult mean = Mean(gradient.data(), 10, 1);
  ChunkState state(10);
  {
    MutexLock lock(state.mutex);
    state.weights.params = Random(10, 1);
  }
  const auto update = [&](bool measures) {
    step.measures = measures;
    return UpdateWeights(mean, rule, pieces, step, state).status();
  };
  const absl::Status nothing = absl::FailedPreconditionError(
      "bucket 3 round 1 chunk 1 pulls, but nothing has been pushed since the last one");
  EXPECT_EQ(update(true), nothing);
  ASSERT_TRUE(KeepMean(mean, pieces, state).ok());
  EXPECT_EQ(update(false), nothing);  // it has not been measured
  EXPECT_TRUE(update(true).ok());
  EXPECT_EQ(update(true), nothing);
  EXPECT_TRUE(update(false).ok());
  EXPECT_EQ(update(false), nothing);
}

}  // namespace
}  // namespace thalweg::update_test
