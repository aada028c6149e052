// These tests check that PowerSGD on a GPU sends, receives and keeps the same bits as in host
// memory, except for P's.
#include "server/sidecar/cuda/cuda_power_sgd.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cctype>

#include "server/sidecar/cuda/power_sgd_pair.h"

namespace thalweg::cuda_power_sgd_test {
namespace {

// The layout has a convolution, odd sizes, and rows of whole 16 bytes; "tall" is a matrix for rank
// 1 only, and "small" and the vectors are none.
const BucketLayout kLayout{DType::kFloat32,
                           {{"conv", {40, 3, 3, 3}},
                            {"bias", {7}},
                            {"small", {3, 5}},
                            {"odd", {37, 53}},
                            {"vector", {3003}},
                            {"wide", {24, 64}},
                            {"tall", {300, 4}}}};
const std::vector<uint32_t> kAll = {0, 1, 2, 3, 4, 5, 6};
const std::vector<uint32_t> kSome = {0, 2, 3, 5, 6};

const BucketLayout kReordered{DType::kFloat32,
                              {{"wide", {24, 64}},
                               {"vector", {3003}},
                               {"tall", {300, 4}},
                               {"odd", {37, 53}},
                               {"small", {3, 5}},
                               {"conv", {40, 3, 3, 3}}}};

std::vector<Floats> Gradients(uint64_t seed, uint32_t workers,
                              const BucketLayout& layout = kLayout) {
  std::vector<Floats> gradients;
  for (uint32_t rank = 0; rank < workers; ++rank) {
    gradients.push_back(RandomFloats(seed * 10 + rank, layout.Elems()));
  }
  return gradients;
}

// Returns gradients that are not finite in the convolution and in a vector.
std::vector<Floats> NonFiniteGradients(uint64_t seed, uint32_t workers) {
  std::vector<Floats> gradients = Gradients(seed, workers);
  gradients[0][100] = std::nanf("");
  gradients[0][101] = std::numeric_limits<float>::infinity();
  gradients[0][1083] = -std::numeric_limits<float>::infinity();
  return gradients;
}

class CudaPowerSgdTest : public ::testing::TestWithParam<const char*> {
 protected:
  const CodecSpec spec_ = *CodecSpec::Parse(GetParam());
  FakeGpus gpus_{1};
  CudaDevice device_{gpus_.All(), nullptr};
};

TEST_P(CudaPowerSgdTest, SendsGetsAndKeepsTheBitsOfANodeWithoutGpus) {
  for (const auto& [workers, members] :
       {std::pair(1u, kAll), std::pair(1u, kSome), std::pair(3u, kAll)}) {
    PairStates states;
    PowerSgdPair pair(gpus_, device_, kLayout, members, spec_, workers, states);
    for (uint64_t round = 1; round <= 3; ++round) {
      ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(round, workers)));
      ASSERT_FALSE(pair.cpu_codec().gave_up());
    }
    // The residual is the rounded difference of X and the result, so that their sum is X up to
    // 2^-24 of the residual, and its squared norm is within 2^-23 · ‖X‖ · ‖residual‖ of X's.
    const CompressionLoss cpu = pair.cpu_codec().loss();
    const CompressionLoss gpu = pair.gpu_codec().loss();
    EXPECT_GT(cpu.residual, 0);
    EXPECT_NEAR(gpu.whole / cpu.whole, 1, 0x1p-22);
    EXPECT_NEAR(gpu.residual / cpu.residual, 1, 1e-11);
    pair.ExpectSameStates();
  }
}

TEST_P(CudaPowerSgdTest, RoundThatIsNotFiniteIsGivenUpWithoutATrace) {
  for (const uint32_t workers : {1u, 3u}) {
    PairStates states;
    PowerSgdPair pair(gpus_, device_, kLayout, kAll, spec_, workers, states);
    ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(1, workers)));
    ASSERT_NO_FATAL_FAILURE(pair.Round(NonFiniteGradients(2, workers)));
    EXPECT_TRUE(pair.gpu_codec().gave_up());
    // The next round begins with the same Q, whose orthonormal columns are orthonormalised once
    // more.
    ASSERT_NO_FATAL_FAILURE(pair.Round(NonFiniteGradients(3, workers)));
    ASSERT_NO_FATAL_FAILURE(pair.ExpectSameStates());
    ASSERT_NO_FATAL_FAILURE(pair.Round(NonFiniteGradients(4, workers)));
    ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(5, workers)));
    EXPECT_FALSE(pair.gpu_codec().gave_up());
    pair.ExpectSameStates();
  }
}

// The elements of the second factor are larger than the gradient's and the first one's.
TEST_P(CudaPowerSgdTest, RoundWhoseSecondFactorIsTooLargeForFp16IsGivenUp) {
  if (spec_.wire != DType::kFloat16) GTEST_SKIP() << "other formats have room for it";
  PairStates states;
  PowerSgdPair pair(gpus_, device_, kLayout, kAll, spec_, 1, states);
  ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(1, 1)));
  constexpr size_t kRows = 37, kColumns = 53, kOdd = 40 * 27 + 7 + 15;
  std::vector<Floats> gradients = {Floats(kLayout.Elems())};
  for (size_t row = 0; row < kRows; ++row) gradients[0][kOdd + row * kColumns] = 30'000;
  ASSERT_NO_FATAL_FAILURE(pair.Round(gradients));
  EXPECT_TRUE(pair.gpu_codec().gave_up());
  EXPECT_EQ(pair.cpu_codec().nonfinite_elems(), 0u);
  ASSERT_NO_FATAL_FAILURE(pair.ExpectSameStates());
  ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(2, 1)));
  EXPECT_FALSE(pair.gpu_codec().gave_up());
  pair.ExpectSameStates();
}

TEST_P(CudaPowerSgdTest, StatesThatWereSavedGoOnInAnotherLayoutAndOnTheOtherKindOfNode) {
  PairStates states;
  {
    PowerSgdPair pair(gpus_, device_, kLayout, kAll, spec_, 1, states);
    for (uint64_t round = 1; round <= 2; ++round) {
      ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(round, 1)));
    }
    ASSERT_NO_FATAL_FAILURE(pair.ExpectSameStates());
  }
  std::swap(states.gpu, states.cpu);
  PowerSgdPair pair(gpus_, device_, kReordered, {0, 1, 2, 3, 4, 5}, spec_, 1, states);
  for (uint64_t round = 3; round <= 4; ++round) {
    ASSERT_NO_FATAL_FAILURE(pair.Round(Gradients(round, 1, kReordered)));
    ASSERT_NO_FATAL_FAILURE(pair.ExpectSameStates());
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, CudaPowerSgdTest,
                         ::testing::Values("powersgd:rank=1,start=0", "powersgd:rank=2,start=0",
                                           "powersgd:rank=4,start=0",
                                           "powersgd:rank=4,start=0,wire=fp16",
                                           "powersgd:rank=2,start=0,warm=0",
                                           "powersgd:rank=2,start=0,feedback=0",
                                           "powersgd:rank=2,start=0,epsilon=1e-3"),
                         [](const auto& param) {
                           std::string name(param.param);
                           for (char& c : name) c = std::isalnum(c) != 0 ? c : '_';
                           return name;
                         });

}  // namespace
}  // namespace thalweg::cuda_power_sgd_test
