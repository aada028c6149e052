// Tests rounds of PowerSGD on a GPU that differ from the others, and counts a round's launches.
#include <gmock/gmock.h>

#include "core/base/protocol.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "kernels/launch/emulator.h"
#include "server/sidecar/cuda/cuda_power_sgd.h"
#include "server/sidecar/cuda/power_sgd_pair.h"

namespace thalweg::cuda_power_sgd_rounds_test {
namespace {

constexpr int64_t kRows = 30;
constexpr int64_t kColumns = 44;
const BucketLayout kLayout{DType::kFloat32,
                           {{"first", {kRows, kColumns}}, {"bias", {30}}, {"second", {64, 36}}}};
const std::vector<uint32_t> kAll = {0, 1, 2};

// The first matrix has rank 1.
Floats DeficientGradient(uint64_t seed) {
  Floats values = RandomFloats(seed, kLayout.Elems());
  const Floats row = RandomFloats(seed + 100, kColumns);
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    values[i] = static_cast<float>(1 + i / kColumns % 4) * row[i % kColumns];
  }
  return values;
}

class CudaPowerSgdRoundsTest : public ::testing::Test {
 protected:
  static CodecSpec Spec(const std::string& more = "") {
    return *CodecSpec::Parse("powersgd:rank=4,start=0" + more);
  }
  std::unique_ptr<PowerSgdPair> Pair(const CodecSpec& spec, uint32_t workers = 1) {
    return std::make_unique<PowerSgdPair>(gpus_, device_, kLayout, kAll, spec, workers, states_);
  }
  static std::vector<Floats> Gradients(uint64_t seed, uint32_t workers = 1) {
    std::vector<Floats> gradients;
    for (uint32_t rank = 0; rank < workers; ++rank) {
      gradients.push_back(RandomFloats(seed * 10 + rank, kLayout.Elems()));
    }
    return gradients;
  }
  // Counts in the second round, which begins with the first one's residual.
  uint64_t LaunchesPerRound(const CodecSpec& spec, uint32_t workers) {
    states_ = {};
    const auto pair = Pair(spec, workers);
    pair->Round(Gradients(1, workers));
    gpus_.Settle();
    const uint64_t before = Emulator::Get().launches();
    pair->Round(Gradients(2, workers));
    gpus_.Settle();
    return Emulator::Get().launches() - before;
  }

  FakeGpus gpus_{1};
  CudaDevice device_{gpus_.All(), nullptr};
  PairStates states_;
};

TEST_F(CudaPowerSgdRoundsTest, DirectionsThatDieAreSeededAnew) {
  const auto pair = Pair(Spec(",feedback=0"));
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    ASSERT_NO_FATAL_FAILURE(pair->Round({DeficientGradient(seed)}));
  }
  pair->ExpectSameStates();
  Floats factor = states_.cpu.at("first")->factor;
  EXPECT_FALSE(OrthogonaliseRows(factor, 4, 0).empty());
}

TEST_F(CudaPowerSgdRoundsTest, FactorThatIsNotFiniteIsForgotten) {
  const auto pair = Pair(Spec());
  ASSERT_NO_FATAL_FAILURE(pair->Round(Gradients(1)));
  ASSERT_NO_FATAL_FAILURE(
      pair->Round(Gradients(2), [](const Part& part, std::vector<std::byte>& mean) {
        const float infinity = std::numeric_limits<float>::infinity();
        if (part.bucket.id.part == 5) std::memcpy(&mean[40], &infinity, sizeof(infinity));
      }));
  EXPECT_EQ(pair->gpu_codec().nonfinite_elems(), static_cast<uint64_t>(kRows));
  pair->ExpectSameStates();
  EXPECT_TRUE(states_.gpu.at("first")->factor.empty());
  EXPECT_FALSE(states_.gpu.at("second")->factor.empty());
  ASSERT_NO_FATAL_FAILURE(
      pair->Round(Gradients(3), [](const Part& part, std::vector<std::byte>& mean) {
        const float nan = std::nanf("");
        if (part.bucket.id.part == 5) std::memcpy(&mean[80], &nan, sizeof(nan));
      }));
  ASSERT_NO_FATAL_FAILURE(pair->Round(Gradients(4)));
  pair->ExpectSameStates();
}

TEST_F(CudaPowerSgdRoundsTest, ResidualFollowsTheLossScaleAsOnANodeWithoutGpus) {
  const auto pair = Pair(Spec());
  uint64_t seed = 0;
  for (const double scale : {8.0, 8.0, 4.0, 16.0}) {
    ASSERT_TRUE(pair->gpu_codec().FollowLossScale(scale).ok());
    ASSERT_TRUE(pair->cpu_codec().FollowLossScale(scale).ok());
    ASSERT_NO_FATAL_FAILURE(pair->Round(Gradients(++seed)));
  }
  pair->ExpectSameStates();
}

TEST_F(CudaPowerSgdRoundsTest, BucketsOfHalfTypesGetTheSameBits) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const uint32_t workers : {1u, 3u}) {
      states_ = {};
      const BucketLayout layout{dtype, kLayout.tensors};
      for (const auto& members : {kAll, std::vector<uint32_t>{0, 2}}) {
        PowerSgdPair pair(gpus_, device_, layout, members, Spec(), workers, states_);
        ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(1, workers)));
        ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(2, workers)));
        std::vector<Floats> gradients = Gradients(3, workers);
        gradients[0][5] = std::nanf("");
        ASSERT_NO_FATAL_FAILURE(pair.Round(gradients));
        EXPECT_TRUE(pair.gpu_codec().gave_up());
        ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(4, workers)));
        ASSERT_NO_FATAL_FAILURE(pair.ExpectSameStates());
      }
    }
  }
}

// Nodes would send what is whole in different orders, if only some buckets of a codec decided late.
TEST_F(CudaPowerSgdRoundsTest, BucketsOfAllTypesDecideToGiveUpAtOnePoint) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const bool is_late : {false, true}) {
      PowerSgdPair pair(gpus_, device_, {dtype, kLayout.tensors}, kAll,
                        Spec(is_late ? ",wire=fp16" : ",wire=bf16"), 1, states_);
      states_ = {};
      for (BucketCodec* codec : {static_cast<BucketCodec*>(&pair.gpu_codec()),
                                 static_cast<BucketCodec*>(&pair.cpu_codec())}) {
        EXPECT_TRUE(codec->MayFollow(*codec->FindPart(4)));
        EXPECT_EQ(codec->MayFollow(*codec->FindPart(5)), is_late) << Name(dtype);
        EXPECT_FALSE(codec->MayFollow(*codec->FindPart(6)));
      }
    }
  }
}

TEST_F(CudaPowerSgdRoundsTest, WhatIsTooLargeForTheBucketsTypeIsCountedAsOnANodeWithoutGpus) {
  const BucketLayout layout{DType::kFloat16, kLayout.tensors};
  PowerSgdPair pair(gpus_, device_, layout, kAll, Spec(), 1, states_);
  uint64_t counted = 0;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Floats gradient = Gradients(seed)[0];
    // Near the largest number: with what earlier rounds left out, some results are beyond it.
    for (float& value : gradient) value = std::copysign(60000.0f, value);
    ASSERT_NO_FATAL_FAILURE(pair.Round({gradient}));
    EXPECT_EQ(pair.gpu_codec().nonfinite_elems(), pair.cpu_codec().nonfinite_elems());
    counted += pair.gpu_codec().nonfinite_elems();
  }
  EXPECT_GT(counted, 0u);
  pair.ExpectSameStates();
}

// The host can begin the round before the gradient is there.
TEST_F(CudaPowerSgdRoundsTest, BeginDoesNotWaitForTheGradient) {
  const auto pair = Pair(Spec(",feedback=0"));
  for (const bool is_deficient : {false, true}) {
    ASSERT_NO_FATAL_FAILURE(pair->Round({is_deficient ? DeficientGradient(1) : Gradients(1)[0]}));
    const DeviceStream stream = pair->gpu().worker(0).stream();
    gpus_[0].Hold(stream);
    pair->gpu().Make(Gradients(2));
    FoldPool pool(1);
    MemoryGradient gradient(pair->gpu().memory());
    ASSERT_TRUE(pair->gpu().memory().BeginRound().ok());
    const auto part = pair->gpu_codec().Begin(pool, gradient);
    ASSERT_TRUE(part.ok()) << part.status();
    EXPECT_EQ(pair->gpu().memory().WaitInput(0, 1, Now()), 0u);
    gpus_[0].Release(stream);
    gpus_.Settle();
  }
}

TEST_F(CudaPowerSgdRoundsTest, ARoundTakesFewLaunches) {
  EXPECT_EQ(LaunchesPerRound(Spec(), 1), 5u);
  // The fold of the shares is added, and a cast of both factors each way.
  EXPECT_EQ(LaunchesPerRound(Spec(",wire=fp16"), 3), 10u);
}

TEST_F(CudaPowerSgdRoundsTest, NothingWaitsForMemoryThatIsNotRegistered) {
  const auto pair = Pair(Spec(",feedback=0"));
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    ASSERT_NO_FATAL_FAILURE(pair->Round({DeficientGradient(seed)}));
  }
  EXPECT_EQ(gpus_[0].pageable_copies(), 0u);
}

TEST_F(CudaPowerSgdRoundsTest, ResultOfTheWrongSizeIsRefused) {
  const auto pair = Pair(Spec());
  ASSERT_NO_FATAL_FAILURE(pair->Round(Gradients(1)));
  const Part& part = *pair->gpu_codec().FindPart(5);
  const std::vector<std::byte> bytes(11);
  RoundResult result;
  result.elems = part.plan.Elems(0);
  result.payload = Payload(bytes, nullptr);
  EXPECT_EQ(pair->gpu_codec().Decode(part, result).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaPowerSgdRoundsTest, BucketWithNothingToGainHasNoCodec) {
  const BucketLayout vectors{DType::kFloat32, {{"a", {100}}, {"b", {2, 3}}}};
  GpuNode gpu(gpus_, device_, vectors, 1);
  const auto codec = gpu.memory().MakePowerSgd(TensorSet(vectors, {0, 1}), {{3}, kMinChunkBytes, 1},
                                               4, DType::kFloat32, Spec(), states_.gpu);
  ASSERT_TRUE(codec.ok());
  EXPECT_EQ(*codec, nullptr);
}

}  // namespace
}  // namespace thalweg::cuda_power_sgd_rounds_test
