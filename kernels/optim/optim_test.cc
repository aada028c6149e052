#include "kernels/optim/optim.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast/test_util.h"

namespace thalweg::optim_test {
namespace {

// Arrays are those of one tensor, parameters and gradients at odd addresses; some elements follow
// the tensor and must not be accessed.
template <class Param, class Grad>
struct Arrays {
  Arrays(size_t tensor_elems, std::mt19937_64& random)
      : elems(tensor_elems),
        param(1, RandomElements<Param>(elems + kBehind, 0, random)),
        grad(3, RandomElements<Grad>(elems + kBehind, 0, random)),
        copy(1, (elems + kBehind) * 2) {
    std::normal_distribution<float> normal;
    for (auto& state : states) {
      for (size_t i = 0; i < elems + kBehind; ++i) {
        state.push_back(std::fabs(normal(random)) * 0.1f);
      }
    }
  }

  template <class Tensor>
  Tensor View(size_t kept) {
    Tensor tensor;
    tensor.param = param.Data();
    tensor.grad = grad.Data();
    for (size_t k = 0; k < kept; ++k) tensor.states[k] = states[k].data();
    tensor.copy = copy.Data();
    tensor.elems = elems;
    tensor.param_type = kTypeOf<Param>;
    tensor.grad_type = kTypeOf<Grad>;
    tensor.copy_type = DType::kBFloat16;
    return tensor;
  }

  bool operator==(const Arrays& other) const {
    return param.Content() == other.param.Content() && states[0] == other.states[0] &&
           states[1] == other.states[1] && states[2] == other.states[2] &&
           copy.Content() == other.copy.Content();
  }

  static constexpr size_t kBehind = 16;

  size_t elems;
  Buffer param;
  Buffer grad;
  std::vector<float> states[3];
  Buffer copy;
};

template <class ParamElement, class GradElement>
struct Types {
  using Param = ParamElement;
  using Grad = GradElement;
};

template <class Types>
class OptimTest : public ::testing::Test {};
using AllTypes = ::testing::Types<Types<Fp32, Fp32>, Types<Fp16, Fp16>, Types<BFloat16, BFloat16>,
                                  Types<Fp32, Fp16>, Types<Fp32, BFloat16>, Types<BFloat16, Fp32>>;
TYPED_TEST_SUITE(OptimTest, AllTypes);

// Runs `step` on `elems` elements as one scalar loop and on every target, with all cuts.
template <class Types, class Tensor, class Scalar, class Run>
void ExpectEqualToScalar(size_t kept, const Scalar& scalar, const Run& run) {
  for (size_t elems : {1, 7, 16, 33, 100, 4095, 4096, 4113, 13000}) {
    std::mt19937_64 random(elems);
    Arrays<typename Types::Param, typename Types::Grad> start(elems, random);
    auto expected = start;
    const Tensor tensor = expected.template View<Tensor>(kept);
    for (size_t i = 0; i < elems; ++i) {
      const float param = Types::Param::Widen(LoadBits<typename Types::Param>(tensor.param, i));
      const float grad = Types::Grad::Widen(LoadBits<typename Types::Grad>(tensor.grad, i));
      const float next = scalar(param, grad, tensor, i);
      StoreBits<typename Types::Param>(Types::Param::Narrow(next), tensor.param, i);
      StoreBits<BFloat16>(BFloat16::Narrow(next), tensor.copy, i);
    }
    for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
      const ForcedTarget forced(target);
      for (uint64_t parts : {1, 2, 3, 7}) {
        auto got = start;
        const std::vector<Tensor> tensors = {got.template View<Tensor>(kept)};
        FlatIndex index;
        index.Add(elems, StepBytes(tensors[0]));
        for (uint64_t part = 0; part < parts; ++part) {
          run(tensors, index, index.Size() * part / parts, index.Size() * (part + 1) / parts);
        }
        ASSERT_TRUE(got == expected)
            << hwy::TargetName(target) << ", " << elems << " elements in " << parts << " parts";
      }
    }
  }
}

TYPED_TEST(OptimTest, AdamEqualsItsScalarFunctionOnEveryTarget) {
  for (bool largest : {false, true}) {
    for (float first : {0.1f, 0.5f, 0.7f}) {
      for (float l2 : {0.0f, 0.01f}) {
        const AdamFactors factors = {.grad = -0.25f,
                                     .decay = 0.999f,
                                     .l2 = l2,
                                     .first = first,
                                     .second_keep = 0.99f,
                                     .second = 0.01f,
                                     .epsilon = 1e-8f,
                                     .step = 0.02f};
        ExpectEqualToScalar<TypeParam, AdamTensor>(
            largest ? 3 : 2,
            [&](float param, float grad, const AdamTensor& t, size_t i) {
              return AdamStep(factors, param, grad, t.states[0] + i, t.states[1] + i,
                              largest ? t.states[2] + i : nullptr);
            },
            [&](std::vector<AdamTensor> tensors, const FlatIndex& index, uint64_t begin,
                uint64_t end) {
              tensors[0].factors = factors;
              RunAdam(tensors, index, begin, end);
            });
      }
    }
  }
}

TEST(AdamTest, LargestSecondMomentThatIsNotANumberStays) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const size_t elems = 33;  // in vectors and behind them
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    std::vector<float> params(elems, 1), grads(elems, 1), firsts(elems), seconds(elems);
    std::vector<float> largests(elems, 4);
    for (const size_t i : {2, 32}) largests[i] = nan;  // was there before
    for (const size_t i : {3, 31}) grads[i] = nan;     // comes now
    AdamTensor tensor;
    tensor.param = params.data();
    tensor.grad = grads.data();
    tensor.states[0] = firsts.data();
    tensor.states[1] = seconds.data();
    tensor.states[2] = largests.data();
    tensor.elems = elems;
    tensor.factors = {.first = 0.1f, .second_keep = 0.9f, .second = 0.1f, .step = 0.5f};
    FlatIndex index;
    index.Add(elems, StepBytes(tensor));
    RunAdam({&tensor, 1}, index, 0, index.Size());
    for (size_t i = 0; i < elems; ++i) {
      const bool is_nan = i == 2 || i == 3 || i == 31 || i == 32;
      EXPECT_EQ(std::isnan(largests[i]), is_nan) << hwy::TargetName(target) << ", " << i;
      EXPECT_EQ(std::isnan(params[i]), is_nan) << hwy::TargetName(target) << ", " << i;
      if (!is_nan) {
        EXPECT_EQ(largests[i], 4);
      }
    }
  }
}

TYPED_TEST(OptimTest, SgdEqualsItsScalarFunctionOnEveryTarget) {
  for (bool momentum : {false, true}) {
    for (bool nesterov : {false, true}) {
      const SgdFactors factors = {.grad = 0.5f,
                                  .l2 = nesterov ? 0.0f : 0.01f,
                                  .keep = 0.9f,
                                  .take = 0.8f,
                                  .momentum = 0.7f,
                                  .lr = 0.1f,
                                  .nesterov = nesterov};
      ExpectEqualToScalar<TypeParam, SgdTensor>(
          momentum ? 1 : 0,
          [&](float param, float grad, const SgdTensor& t, size_t i) {
            return SgdStep(factors, param, grad, momentum ? t.states[0] + i : nullptr);
          },
          [&](std::vector<SgdTensor> tensors, const FlatIndex& index, uint64_t begin,
              uint64_t end) {
            tensors[0].factors = factors;
            RunSgd(tensors, index, begin, end);
          });
    }
  }
}

TYPED_TEST(OptimTest, LambEqualsItsScalarFunctionsOnEveryTarget) {
  for (bool decoupled : {false, true}) {
    const LambFactors factors = {.grad = 0.5f,
                                 .l2 = decoupled ? 0.0f : 0.01f,
                                 .decay = decoupled ? 0.01f : 0.0f,
                                 .first_keep = 0.9f,
                                 .first = 0.1f,
                                 .second_keep = 0.99f,
                                 .second = 0.01f,
                                 .correction = 1.5f,
                                 .epsilon = 1e-6f};
    std::vector<double> squares(10);
    ExpectEqualToScalar<TypeParam, LambTensor>(
        2,
        [&](float param, float grad, const LambTensor& t, size_t i) {
          LambMoments(factors, param, grad, t.states[0] + i, t.states[1] + i);
          return LambStep(0.02f, param, LambUpdate(factors, param, t.states[0][i], t.states[1][i]));
        },
        [&](std::vector<LambTensor> tensors, const FlatIndex& index, uint64_t begin, uint64_t end) {
          tensors[0].factors = factors;
          tensors[0].rate = 0.02f;
          RunLambMoments(tensors, index, begin, end, squares.data(), squares.data());
          RunLambStep(tensors, index, begin, end);
        });
  }
}

// Sums as the definition says, in plain loops: sixteen sums per granule, of every sixteenth element
// each.
double SquaresOf(const std::vector<float>& values, size_t first, size_t last) {
  double sums[16] = {};
  for (size_t i = first; i < last; ++i) {
    sums[(i - first) % 16] += static_cast<double>(values[i]) * values[i];
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

TEST(SquaresTest, AreTheSameBitsOnEveryTargetHoweverTheyAreCut) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  const size_t elems = 3 * FlatIndex::kGranule + 77;
  std::vector<float> values(elems);
  for (float& value : values) value = normal(random);
  OptimTensor tensor;
  tensor.grad = values.data();
  tensor.elems = elems;
  const std::vector<OptimTensor> tensors = {tensor};
  FlatIndex index;
  index.Add(elems, sizeof(float));
  std::vector<double> expected;
  for (size_t i = 0; i < elems; i += FlatIndex::kGranule) {
    expected.push_back(SquaresOf(values, i, std::min<size_t>(elems, i + FlatIndex::kGranule)));
  }
  ASSERT_EQ(index.Granules(), expected.size());
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    for (uint64_t parts : {1, 2, 5}) {
      std::vector<double> got(expected.size());
      for (uint64_t part = 0; part < parts; ++part) {
        RunGradSquares(tensors, index, index.Size() * part / parts,
                       index.Size() * (part + 1) / parts, got.data());
      }
      EXPECT_EQ(got, expected) << hwy::TargetName(target);
    }
  }
}

TEST(SquaresTest, LargeFiniteGradientsDoNotOverflowAndOthersShow) {
  std::vector<float> values(40, 3e38f);
  OptimTensor tensor;
  tensor.grad = values.data();
  tensor.elems = values.size();
  const std::vector<OptimTensor> tensors = {tensor};
  FlatIndex index;
  index.Add(values.size(), sizeof(float));
  double sum = 0;
  RunGradSquares(tensors, index, 0, index.Size(), &sum);
  // 40 equal squares in 64 bits have at most 40 roundings of 2^-53 each.
  EXPECT_NEAR(sum, 40 * std::pow(static_cast<double>(3e38f), 2), sum * 40 * 0x1p-53);
  values[33] = std::numeric_limits<float>::infinity();
  RunGradSquares(tensors, index, 0, index.Size(), &sum);
  EXPECT_FALSE(std::isfinite(sum));
}

// The expected numbers are the bytes per parameter of docs/optim.md.
TEST(StepBytesTest, CountEveryReadAndEveryWrite) {
  OptimTensor tensor;
  float state = 0;
  for (const uint64_t expected : {12, 20, 28, 36}) {
    EXPECT_EQ(StepBytes(tensor), expected);
    if (expected < 36) tensor.states[(expected - 12) / 8] = &state;
  }
  tensor.states[2] = nullptr;
  tensor.copy = &state;
  tensor.copy_type = DType::kFloat16;
  EXPECT_EQ(StepBytes(tensor), 30u);
  tensor.copy = nullptr;
  tensor.param_type = tensor.grad_type = DType::kBFloat16;
  EXPECT_EQ(StepBytes(tensor), 22u);
}

TEST(FlatIndexTest, EveryElementIsVisitedOnceHoweverTheIndexIsCut) {
  std::mt19937_64 random(6);
  const std::vector<uint64_t> sizes = {1, 0, 5000, 4096, 3, 0, 0, 12289, 1, 8192};
  FlatIndex index;
  for (size_t i = 0; i < sizes.size(); ++i) index.Add(sizes[i], 1 + i % 5);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<uint64_t> cuts = {0, index.Size()};
    for (unsigned k = random() % 6; k > 0; --k) cuts.push_back(random() % (index.Size() + 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::vector<int>> visits;
    for (uint64_t size : sizes) visits.emplace_back(size);
    std::vector<int> granules(index.Granules());
    for (size_t k = 0; k + 1 < cuts.size(); ++k) {
      index.ForEach(cuts[k], cuts[k + 1], [&](const FlatIndex::Piece& piece) {
        EXPECT_EQ(piece.first % FlatIndex::kGranule, 0u);
        EXPECT_EQ(piece.granule,
                  index.FirstGranule(piece.tensor) + piece.first / FlatIndex::kGranule);
        for (uint64_t i = piece.first; i < piece.last; ++i) ++visits[piece.tensor][i];
        for (uint64_t i = piece.first; i < piece.last; i += FlatIndex::kGranule) {
          ++granules[piece.granule + (i - piece.first) / FlatIndex::kGranule];
        }
      });
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      ASSERT_EQ(visits[i], std::vector<int>(sizes[i], 1)) << "tensor " << i;
    }
    ASSERT_EQ(granules, std::vector<int>(index.Granules(), 1));
  }
}

TEST(FlatIndexTest, StretchesOfEqualLengthHaveEqualBytesUpToAGranule) {
  FlatIndex index;
  index.Add(100'000, 28);
  index.Add(300'000, 14);
  uint64_t bytes = 0;
  index.ForEach(0, index.Size() / 2, [&](const FlatIndex::Piece& piece) {
    bytes += (piece.last - piece.first) * (piece.tensor == 0 ? 28 : 14);
  });
  EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(index.Size()) / 2,
              28.0 * FlatIndex::kGranule);
}

}  // namespace
}  // namespace thalweg::optim_test
