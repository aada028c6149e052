// These tests cover a step's factors: norms, scales, factors, and the plan that says where things
// lie.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/optim/load_store.h"
#include "kernels/optim/optim_cuda.h"
#include "kernels/optim/optim_cuda_test_util.h"

namespace thalweg::optim_scale_cuda_test {
namespace {

using ::testing::HasSubstr;

class GradSquaresCudaTest : public DeviceTest {
 protected:
  struct Result {
    double squares = 0;
    float found_inf = 0;
  };

  static Result Find(std::vector<TwinTensor>& twins) {
    std::vector<DeviceTensor> tensors;
    for (TwinTensor& twin : twins) tensors.push_back(twin.OnDevice());
    const OptimPlan plan = OptimPlan::Make(tensors).value();
    const DeviceBuffer table(std::vector<std::byte>(plan.table().begin(), plan.table().end()));
    const DeviceBuffer workspace(plan.workspace_bytes());
    const DeviceBuffer squares(sizeof(double));
    const DeviceBuffer found_inf(std::vector<float>{7});
    EXPECT_TRUE(GradSquaresOnDevice(nullptr, plan, {table.Data(), workspace.Span()},
                                    squares.As<double>(), found_inf.As<float>())
                    .ok());
    EXPECT_TRUE(FinishDevice().ok());
    return {squares.ContentAs<double>()[0], found_inf.ContentAs<float>()[0]};
  }

  // Sums in the order that the header defines.
  static double OnHost(std::vector<TwinTensor>& twins) {
    std::vector<OptimTensor> tensors;
    FlatIndex index;
    for (TwinTensor& twin : twins) {
      tensors.push_back(twin.OnHost());
      index.Add(tensors.back().elems, 1);
    }
    std::vector<double> sums(index.Granules());
    RunGradSquares(tensors, index, 0, index.Size(), sums.data());
    std::vector<double> parts(256);
    for (size_t g = 0; g < sums.size(); ++g) parts[g % 256] += sums[g];
    double total = 0;
    for (const double part : parts) total += part;
    return total;
  }
};

TEST_F(GradSquaresCudaTest, EqualTheCpuForAllTypesSizesAndAddresses) {
  std::mt19937_64 random(3);
  std::vector<TwinTensor> twins;
  for (const TensorKind& kind : AllKinds()) twins.emplace_back(kind, 0, random);
  const Result result = Find(twins);
  EXPECT_EQ(result.squares, OnHost(twins));
  EXPECT_EQ(result.found_inf, 0.0f);
}

TEST_F(GradSquaresCudaTest, MoreGranulesThanThreadsAreAddedInOneOrder) {
  std::mt19937_64 random(4);
  std::vector<TwinTensor> twins;
  // Tensors of one element and of one granule alternate: their sums have very different sizes.
  for (size_t i = 0; i < 600; ++i) {
    const size_t elems = i % 8 == 0 ? kGranule : 1;
    twins.emplace_back(TensorKind{.elems = elems, .grad = DType::kBFloat16}, 0, random);
  }
  EXPECT_EQ(Find(twins).squares, OnHost(twins));
}

TEST_F(GradSquaresCudaTest, WarpsKeepTheSumsOfTheirGranulesApart) {
  std::mt19937_64 random(6);
  std::vector<TwinTensor> twins;
  // The last warp has one granule, a short one.
  twins.emplace_back(TensorKind{.elems = 3 * 24 * kGranule + 5}, 0, random);
  EXPECT_EQ(Find(twins).squares, OnHost(twins));
}

TEST_F(GradSquaresCudaTest, LargeFiniteGradientsAreFiniteAndOthersAreFound) {
  std::mt19937_64 random(5);
  std::vector<TwinTensor> twins;
  twins.emplace_back(TensorKind{.elems = 5000}, 0, random);
  TwinArray& grad = twins.back().grad();
  std::vector<std::byte> content(5000 * sizeof(float));
  for (size_t i = 0; i < 5000; ++i) {
    StoreBits<Fp32>(Fp32::Narrow(i % 2 == 0 ? 3e38f : -3e38f), content.data(), i);
  }
  grad.Fill(content);
  EXPECT_TRUE(std::isfinite(Find(twins).squares));
  EXPECT_EQ(Find(twins).found_inf, 0.0f);
  for (const uint32_t bits : {Fp32::kInfinity, Fp32::kNan}) {
    StoreBits<Fp32>(bits, content.data(), 4999);
    grad.Fill(content);
    EXPECT_FALSE(std::isfinite(Find(twins).squares));
    EXPECT_EQ(Find(twins).found_inf, 1.0f);
  }
}

TEST(OptimFactorsTest, PowersAreCorrectlyRoundedToFloat32AndCloseInFloat64) {
  for (const double base : {0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.999999}) {
    for (uint64_t exponent = 1; exponent < (1 << 24); exponent += 1 + exponent / 3) {
      const long double exact = std::pow(static_cast<long double>(base), exponent);
      // There is one rounding to float64, also of subnormal numbers.
      const double allowed = static_cast<double>(exact) * 0x1p-53 + 0x1p-1074;
      EXPECT_NEAR(PowerOf(base, exponent), static_cast<double>(exact), allowed * 1.001)
          << base << "^" << exponent;
    }
  }
}

TEST(OptimFactorsTest, EqualTheFormulasWithTheLibrarysPowersAtEveryStep) {
  AdamSettings settings;
  settings.lr = 1e-3;
  settings.epsilon = 1e-8;
  for (const auto& [beta1, beta2] : {std::pair{0.9, 0.999}, {0.95, 0.98}, {0.0, 0.9999}}) {
    settings.beta1 = beta1;
    settings.beta2 = beta2;
    for (double step = 1; step <= 3000; ++step) {
      const AdamFactors factors = FactorsOf(settings, BiasCorrectionsAt(settings, step), 1);
      const double root = std::sqrt(1 - std::pow(beta2, step));
      ASSERT_EQ(factors.epsilon, static_cast<float>(settings.epsilon * root)) << step;
      ASSERT_EQ(factors.step, static_cast<float>(1e-3 * root / (1 - std::pow(beta1, step))))
          << step;
    }
  }
}

TEST(OptimFactorsTest, NormThatIsNotANumberIsNoNormWithinTheBound) {
  OptimSettings settings;
  settings.max_grad_norm = 1;
  EXPECT_TRUE(std::isnan(GradFactorOf(settings, 1, std::nan(""))));
  EXPECT_EQ(GradFactorOf(settings, 0.5, 4), 0.5);    // the norm is 1
  EXPECT_EQ(GradFactorOf(settings, 0.5, 16), 0.25);  // the norm is 2
  settings.maximize = true;
  EXPECT_EQ(GradFactorOf(settings, 0.5, 16), -0.25);
}

TEST(OptimFactorsTest, InfiniteNormLeavesNothingOfFiniteGradients) {
  OptimSettings settings;
  settings.max_grad_norm = 1;
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(GradFactorOf(settings, 0.5, infinity), 0.0);
  settings.max_grad_norm = infinity;  // bounds no other norm
  EXPECT_EQ(GradFactorOf(settings, 0.5, 1e300), 0.5);
}

TEST(OptimFactorsTest, EpsilonIsAddedToTheNormOfUnscaledGradients) {
  OptimSettings settings;
  settings.max_grad_norm = 1;
  settings.norm_epsilon = 2;
  EXPECT_EQ(GradFactorOf(settings, 1, 4), 0.25);      // 1 / (2 + 2)
  EXPECT_EQ(GradFactorOf(settings, 0.5, 16), 0.125);  // the norm is 2 again
  EXPECT_EQ(GradFactorOf(settings, 1, 0), 0.5);
}

TEST(OptimFactorsTest, TrustRatioIsOneWhereANormIsZero) {
  EXPECT_EQ(TrustedRate(0.5f, 16, 4), 1.0f);
  EXPECT_EQ(TrustedRate(0.5f, 4, 16), 0.25f);
  EXPECT_EQ(TrustedRate(0.5f, 0, 4), 0.5f);
  EXPECT_EQ(TrustedRate(0.5f, 4, 0), 0.5f);
}

TEST(ForEachPlaceTest, EveryElementIsVisitedOnceAlsoBeyond32Bits) {
  for (const uint64_t first : {uint64_t{0}, uint64_t{1} << 33}) {
    for (const uint32_t elems : {1, 7, 8, 15, 16, 23, 300, 4096}) {
      for (const uint8_t head : {uint8_t{0}, uint8_t{3}, uint8_t{7}, kNoPacks}) {
        std::vector<int> visits(elems);
        uint32_t packed = 0;
        for (uint32_t index = 0; index < 32; ++index) {
          const auto visit = [&]<bool kPacked>(const ElementPlace& place) {
            for (uint32_t e = 0; e < place.count; ++e) ++visits.at(place.At(e) - first);
            if (!kPacked) return;
            packed += place.count;
            EXPECT_EQ((place.first - first) % kQuad, head % kQuad);
          };
          ForEachPlace(index, 32, head, {0, first, elems}, visit);
        }
        EXPECT_EQ(visits, std::vector<int>(elems, 1)) << elems << ", head " << int{head};
        EXPECT_EQ(packed, head == kNoPacks || head > elems ? 0 : (elems - head) / kQuad * kQuad);
      }
    }
  }
}

// Accesses of 16 bytes begin at the first element where all arrays of a tensor have a multiple of
// that.
TEST(OptimPlanTest, PacksBeginAtTheFirstPlaceThatAllArraysShare) {
  alignas(16) std::byte arrays[2][64] = {};
  const auto head = [&](DType type, size_t param_shift, size_t grad_shift) {
    DeviceTensor tensor;
    tensor.elems = 1;
    tensor.param = arrays[0] + param_shift * SizeOf(type);
    tensor.grad = arrays[1] + grad_shift * SizeOf(type);
    tensor.param_type = tensor.grad_type = type;
    const OptimPlan plan = OptimPlan::Make({&tensor, 1}).value();
    return int{reinterpret_cast<const OptimEntry*>(plan.table().data())->head};
  };
  for (size_t shift = 0; shift < 8; ++shift) {
    EXPECT_EQ(head(DType::kBFloat16, shift, shift), static_cast<int>((8 - shift) % 8));
    EXPECT_EQ(head(DType::kFloat32, shift, shift), static_cast<int>((8 - shift) % 4));
    EXPECT_EQ(head(DType::kBFloat16, shift, (shift + 1) % 8), int{kNoPacks});
  }
}

TEST(OptimPlanTest, WhereStepsAreCountedKeepsNothingFromBeingPacked) {
  alignas(16) float arrays[3][4] = {};
  DeviceTensor tensor;
  tensor.elems = 4;
  tensor.param = arrays[0];
  tensor.grad = arrays[1];
  tensor.step = arrays[2] + 1;
  const OptimPlan plan = OptimPlan::Make({&tensor, 1}).value();
  EXPECT_EQ(reinterpret_cast<const OptimEntry*>(plan.table().data())->head, 0);
}

TEST(OptimPlanTest, TensorsWithoutElementsNeedNoStates) {
  float array[4] = {};
  DeviceTensor tensor;
  tensor.elems = 4;
  tensor.param = tensor.states[0] = tensor.states[1] = array;
  tensor.grad = array;
  const std::vector<DeviceTensor> tensors = {{}, tensor};
  EXPECT_EQ(OptimPlan::Make(tensors)->states(), 2);
}

TEST(OptimPlanTest, GranulesOfAllTensorsAreFoundByNumber) {
  std::vector<float> array(3 * kGranule);
  std::vector<DeviceTensor> tensors;
  std::vector<std::array<uint64_t, 3>> expected;
  for (const uint64_t elems : {uint64_t{0}, uint64_t{1}, 2 * kGranule + 1, uint64_t{0}, uint64_t{0},
                               kGranule, uint64_t{7}, uint64_t{0}}) {
    for (uint64_t first = 0; first < elems; first += kGranule) {
      expected.push_back({tensors.size(), first, std::min(kGranule, elems - first)});
    }
    DeviceTensor& tensor = tensors.emplace_back();
    tensor.elems = elems;
    tensor.param = array.data();
    tensor.grad = array.data();
  }
  const OptimPlan plan = OptimPlan::Make(tensors).value();
  ASSERT_EQ(plan.granules(), expected.size());
  const OptimTable table = {reinterpret_cast<const OptimEntry*>(plan.table().data()),
                            plan.tensors(), plan.granules()};
  for (uint64_t number = 0; number < expected.size(); ++number) {
    const Granule granule = GranuleAt(table, number);
    EXPECT_EQ(expected[number],
              (std::array<uint64_t, 3>{granule.tensor, granule.first, granule.count}));
  }
}

TEST(OptimPlanTest, RefusesWhatKernelsCannotRead) {
  float array[4] = {};
  DeviceTensor tensor;
  tensor.elems = 1;
  tensor.param = array;
  tensor.grad = array;
  const auto refusal = [](const DeviceTensor& refused) {
    const std::vector<DeviceTensor> tensors = {{}, refused};
    const absl::StatusOr<OptimPlan> plan = OptimPlan::Make(tensors);
    EXPECT_TRUE(absl::IsInvalidArgument(plan.status()));
    return std::string(plan.status().message());
  };
  DeviceTensor odd = tensor;
  odd.grad = reinterpret_cast<std::byte*>(array) + 2;
  EXPECT_THAT(refusal(odd), HasSubstr("tensor 1: expected a gradient at a multiple of 4 bytes"));
  DeviceTensor wide = tensor;
  wide.param_type = DType::kFloat64;
  EXPECT_THAT(refusal(wide), HasSubstr("expected a parameter in fp32, fp16 or bf16, got fp64"));
  DeviceTensor empty = tensor;
  empty.grad = nullptr;
  EXPECT_THAT(refusal(empty), HasSubstr("got no gradient"));
}

}  // namespace
}  // namespace thalweg::optim_scale_cuda_test
