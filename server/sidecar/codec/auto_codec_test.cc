#include "server/sidecar/codec/auto_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "server/sidecar/codec/codec_costs.h"

namespace thalweg::auto_codec_test {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

enum Candidate : uint32_t { kFp32, kFp16, kInt8, kPowerSgd };  // of AutoCandidates

// Two layers' gradients: 4 MB in a matrix, 4 kB in a vector.
const BucketLayout kLayers{DType::kFloat32, {{"w", {1000, 1000}}, {"b", {1000}}}};
constexpr double kElems = 1'001'000;

// Computing costs nothing.
AutoTerms Terms(double bytes_per_second, uint32_t num_nodes = 2, uint32_t num_shards = 2) {
  AutoTerms terms;
  terms.candidates = AutoCandidates(*CodecSpec::Parse("auto:4"));
  terms.costs.resize(terms.candidates.size());
  terms.link = {bytes_per_second, std::chrono::milliseconds(1)};
  terms.num_nodes = num_nodes;
  terms.num_shards = num_shards;
  return terms;
}

double MostOf(double a, double b, double c) { return std::max(a, std::max(b, c)); }

TEST(AutoCodecTest, LinkTakesAsLongAsTheDocumentedBytes) {
  const AutoChoice choice = ChooseCodec(kLayers, Terms(1e6));
  EXPECT_DOUBLE_EQ(choice.seconds[kFp32], 4 * kElems / 1e6 + 0.001);
  EXPECT_DOUBLE_EQ(choice.seconds[kFp16], 2 * kElems / 1e6 + 0.001);
  // docs/codecs.md: a byte each, and four for each begun block of 256.
  EXPECT_DOUBLE_EQ(choice.seconds[kInt8], (kElems + 4 * std::ceil(kElems / 256)) / 1e6 + 0.001);
  // P and Q of 1000 × 4 each, the vector as it is; two round trips.
  EXPECT_DOUBLE_EQ(choice.seconds[kPowerSgd], 4 * (4000 + 4000 + 1000) / 1e6 + 0.002);
  EXPECT_EQ(choice.codec, kPowerSgd);
}

TEST(AutoCodecTest, LinksOfFewShardsCarryMoreThanThoseOfNodes) {
  const AutoChoice choice = ChooseCodec(kLayers, Terms(1e6, /*num_nodes=*/8, /*num_shards=*/2));
  EXPECT_DOUBLE_EQ(choice.seconds[kFp32], 4 * (4 * kElems / 1e6) + 0.001);
  EXPECT_DOUBLE_EQ(choice.seconds[kPowerSgd], 4 * (36'000 / 1e6) + 0.002);
  const AutoChoice many_shards =
      ChooseCodec(kLayers, Terms(1e6, /*num_nodes=*/2, /*num_shards=*/8));
  EXPECT_DOUBLE_EQ(many_shards.seconds[kFp32], 4 * kElems / 1e6 + 0.001);
}

TEST(AutoCodecTest, LinksTakeWhatTheSharesArePredictedToTake) {
  // Four nodes host a shard each: a link carries the gradient one and a half times.
  AutoTerms terms = Terms(1e6, /*num_nodes=*/4, /*num_shards=*/4);
  terms.seconds_per_byte = 1.5e-6;
  const AutoChoice choice = ChooseCodec(kLayers, terms);
  EXPECT_DOUBLE_EQ(choice.seconds[kFp32], 4 * kElems * 1.5e-6 + 0.001);
  EXPECT_DOUBLE_EQ(choice.seconds[kPowerSgd], 36'000 * 1.5e-6 + 0.002);
}

TEST(AutoCodecTest, ChunksOverlapSoThatTheSlowestStageCounts) {
  AutoTerms terms = Terms(1e9, /*num_nodes=*/4, /*num_shards=*/2);
  const double bytes = 4 * kElems;
  for (const auto& [node, shard] : {std::pair{1e-12, 1e-12}, {5e-9, 1e-12}, {1e-12, 9e-9}}) {
    terms.costs[kFp32] = {node, shard, 0};
    const double expected = MostOf(2 * bytes / 1e9, bytes * node, bytes * shard / 2) + 0.001;
    EXPECT_DOUBLE_EQ(ChooseCodec(kLayers, terms).seconds[kFp32], expected);
    terms.costs[kInt8] = {node, shard, 0};
    const double int8_bytes = kElems + 4 * std::ceil(kElems / 256);
    EXPECT_DOUBLE_EQ(ChooseCodec(kLayers, terms).seconds[kInt8],
                     MostOf(2 * int8_bytes / 1e9, bytes * node, bytes * shard / 2) + 0.001);
  }
}

TEST(AutoCodecTest, ComputingOfPowerSgdOverlapsWithNothing) {
  AutoTerms terms = Terms(1e6);
  terms.costs[kPowerSgd] = {1e-8, 1e-3, 1e-6};
  terms.costs[kFp32] = {3e-8, 4e-3, 0};  // of the vector
  const double computing = 4e6 * 1e-8 + 4 * 8000 * 1e-6 + 4 * 1000 * 3e-8;
  const double folding = (4 * 8000 * 1e-3 + 4 * 1000 * 4e-3) / 2;
  EXPECT_NEAR(ChooseCodec(kLayers, terms).seconds[kPowerSgd], computing + folding + 0.002, 1e-9);
}

TEST(AutoCodecTest, SlowLinksGetFactorsAndFastOnesNothing) {
  // MeasureCosts finds these on two cores of a server, in seconds per byte.
  const std::vector<CodecCost> costs = {
      {7e-11, 3e-11, 0}, {8e-11, 4e-11, 0}, {3e-10, 1e-10, 0}, {4e-10, 3e-11, 2e-9}};
  const auto chosen = [&](double bytes_per_second) {
    AutoTerms terms = Terms(bytes_per_second);
    terms.costs = costs;
    return ChooseCodec(kLayers, terms);
  };
  EXPECT_EQ(chosen(12.5e6).codec, kPowerSgd);  // 100 Mbit/s
  EXPECT_EQ(chosen(5e10).codec, kFp32);
  // Between these, a faster link means a more exact codec.
  uint32_t last = kPowerSgd;
  for (double rate = 1e7; rate < 1e11; rate *= 1.3) {
    const uint32_t codec = chosen(rate).codec;
    EXPECT_LE(codec, last) << rate;
    last = codec;
  }
}

TEST(AutoCodecTest, WithoutANetworkOnlyComputingCounts) {
  AutoTerms terms = Terms(0);
  terms.link.round_trip = {};
  terms.costs = {{1e-10, 1e-10, 0}, {2e-10, 1e-10, 0}, {3e-10, 1e-10, 0}, {4e-10, 1e-10, 1e-9}};
  const AutoChoice choice = ChooseCodec(kLayers, terms);
  EXPECT_EQ(choice.codec, kFp32);
  EXPECT_DOUBLE_EQ(choice.seconds[kFp32], 4 * kElems * 1e-10);
  EXPECT_THAT(choice.reason, StartsWith("4 MB in 2 tensors without a network: compression would "
                                        "not help: fp32 400 µs (sends 4 MB, computes 400 µs) "));
}

TEST(AutoCodecTest, ReasonNamesTheChoiceFirstAndTheOthersByTime) {
  EXPECT_EQ(ChooseCodec(kLayers, Terms(1e6)).reason,
            "4 MB in 2 tensors at 1 MB/s: powersgd 38 ms (sends 36 kB, computes 0 µs) rather than "
            "int8 1.02 s (sends 1.02 MB, computes 0 µs), fp16 2 s (sends 2 MB, computes 0 µs), "
            "fp32 4 s (sends 4 MB, computes 0 µs)");
}

TEST(AutoCodecTest, SmallGainsAreNotWorthDigits) {
  AutoTerms terms = Terms(0);
  terms.costs = {{1.019, 0, 0}, {1.03, 0, 0}, {1.0, 0, 0}, {9, 0, 0}};
  EXPECT_EQ(ChooseCodec({DType::kFloat32, {{"a", {1000}}}}, terms).codec, kFp32);
  terms.costs[kFp32].node = 1.021;
  EXPECT_EQ(ChooseCodec({DType::kFloat32, {{"a", {1000}}}}, terms).codec, kInt8);
  terms.costs[kFp16].node = 1.019;
  EXPECT_EQ(ChooseCodec({DType::kFloat32, {{"a", {1000}}}}, terms).codec, kFp16);
}

TEST(AutoCodecTest, TensorsWithoutFactorsAreSentAsTheyAre) {
  const BucketLayout vectors{DType::kFloat32, {{"a", {5000}}, {"scalar", {}}, {"none", {0, 4}}}};
  const AutoChoice choice = ChooseCodec(vectors, Terms(1e6));
  EXPECT_DOUBLE_EQ(choice.seconds[kPowerSgd], choice.seconds[kFp32]);
  EXPECT_EQ(choice.codec, kInt8);
}

TEST(AutoCodecTest, HalfGradientsAreCountedInTheirOwnType) {
  const BucketLayout half{DType::kBFloat16, kLayers.tensors};
  const AutoChoice choice = ChooseCodec(half, Terms(1e6));
  EXPECT_DOUBLE_EQ(choice.seconds[kFp32], 2 * kElems / 1e6 + 0.001);
  EXPECT_DOUBLE_EQ(choice.seconds[kFp16], choice.seconds[kFp32]);
  EXPECT_DOUBLE_EQ(choice.seconds[kInt8], (kElems + 4 * std::ceil(kElems / 256)) / 1e6 + 0.001);
}

TEST(AutoCodecTest, DoublesAreLeftAlone) {
  const BucketLayout doubles{DType::kFloat64, kLayers.tensors};
  const AutoChoice choice = ChooseCodec(doubles, Terms(1e6));
  EXPECT_EQ(choice.codec, kFp32);
  for (const double seconds : choice.seconds) EXPECT_DOUBLE_EQ(seconds, 8 * kElems / 1e6 + 0.001);
}

TEST(AutoCodecTest, NothingToSendIsNotCompressed) {
  EXPECT_EQ(ChooseCodec({DType::kFloat32, {}}, Terms(1e6)).codec, kFp32);
}

TEST(AutoCodecTest, NoCandidateIsFasterByMoreThanTwoPercent) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> exponent(0, 6);
  const auto any = [&](double least) { return least * std::pow(10, exponent(random)); };
  for (int i = 0; i < 2000; ++i) {
    AutoTerms terms = Terms(any(1e5), 1 + random() % 9, 1 + random() % 9);
    for (CodecCost& cost : terms.costs) cost = {any(1e-12), any(1e-12), any(1e-12)};
    const AutoChoice choice = ChooseCodec(kLayers, terms);
    const double best = *std::min_element(choice.seconds.begin(), choice.seconds.end());
    ASSERT_LE(choice.seconds[choice.codec], 1.02 * best);
    for (uint32_t earlier = 0; earlier < choice.codec; ++earlier) {
      ASSERT_GT(choice.seconds[earlier], 1.02 * best);
    }
  }
}

TEST(CodecCostsTest, EveryStageOfEveryCodecTakesTime) {
  std::vector<CodecSpec> codecs = AutoCandidates(*CodecSpec::Parse("auto"));
  for (const char* text : {"bf16", "onebit", "topk:1", "powersgd:256"}) {
    codecs.push_back(*CodecSpec::Parse(text));
  }
  const std::vector<CodecCost> costs = MeasureCosts(codecs, /*num_nodes=*/100, /*threads=*/2);
  ASSERT_EQ(costs.size(), codecs.size());
  for (size_t i = 0; i < codecs.size(); ++i) {
    // Between a hundred bytes per cycle and a hundred thousand cycles per byte.
    for (const double seconds : {costs[i].node, costs[i].shard}) {
      EXPECT_GT(seconds, 1e-12) << codecs[i].Name();
      EXPECT_LT(seconds, 1e-4) << codecs[i].Name();
    }
    EXPECT_EQ(costs[i].factors > 0, codecs[i].kind == CodecKind::kPowerSgd) << codecs[i].Name();
  }
}

TEST(CodecCostsTest, SlowerOneHasTheLargerOfEachCost) {
  EXPECT_EQ(Slower({1, 5, 3}, {2, 4, 3}), (CodecCost{2, 5, 3}));
}

}  // namespace
}  // namespace thalweg::auto_codec_test
