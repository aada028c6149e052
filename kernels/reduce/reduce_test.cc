#include "kernels/reduce/reduce.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"

namespace thalweg::reduce_test {
namespace {

template <class InElement, class OutElement>
struct Types {
  using In = InElement;
  using Out = OutElement;
};

struct Result {
  std::vector<std::byte> out;
  uint64_t nonfinite = 0;
  bool operator==(const Result&) const = default;
};

// Computes the definition in reduce.h, word by word.
template <class In, class Out>
Result Reference(const std::vector<std::vector<std::byte>>& inputs,
                 const std::vector<float>& weights, float divisor, size_t elems) {
  Result result;
  result.out.resize(elems * sizeof(typename Out::Bits));
  for (size_t i = 0; i < elems; ++i) {
    typename In::Accumulator sum = weights[0] * In::Widen(LoadBits<In>(inputs[0].data(), i));
    for (size_t k = 1; k < inputs.size(); ++k) {
      const typename In::Accumulator weight = weights[k];
      sum = std::fma(weight, In::Widen(LoadBits<In>(inputs[k].data(), i)), sum);
    }
    typename Out::Bits bits = Out::Narrow(sum / divisor);
    const auto rounded = Out::Widen(bits);
    if (std::isnan(rounded)) bits = Out::kNan;
    if (!std::isfinite(rounded)) ++result.nonfinite;
    StoreBits<Out>(bits, result.out.data(), i);
  }
  return result;
}

template <class In, class Out>
Result Fold(const std::vector<std::vector<std::byte>>& inputs, const std::vector<float>& weights,
            float divisor, size_t elems, size_t rotation) {
  std::vector<Buffer> buffers;
  std::vector<const void*> pointers;
  for (size_t k = 0; k < inputs.size(); ++k) {
    buffers.emplace_back(kMisalignments[(k + rotation) % kMisalignments.size()], inputs[k]);
  }
  for (Buffer& buffer : buffers) pointers.push_back(buffer.Data());
  Buffer out(kMisalignments[(inputs.size() + 2 * rotation) % kMisalignments.size()],
             elems * sizeof(typename Out::Bits));
  Result result;
  result.nonfinite =
      FoldMean(pointers, weights, divisor, kTypeOf<In>, kTypeOf<Out>, out.Data(), elems);
  result.out = out.Content();
  return result;
}

template <class Types>
class FoldMeanTest : public ::testing::Test {};
using AllTypes = ::testing::Types<Types<Fp32, Fp32>, Types<Fp16, Fp16>, Types<BFloat16, BFloat16>,
                                  Types<Fp64, Fp64>, Types<Fp32, Fp16>, Types<Fp32, BFloat16>>;
TYPED_TEST_SUITE(FoldMeanTest, AllTypes);

TYPED_TEST(FoldMeanTest, EqualsItsDefinitionForAnySizeAddressNumberAndTarget) {
  using In = typename TypeParam::In;
  using Out = typename TypeParam::Out;
  std::mt19937_64 random(3);
  for (size_t elems : TestSizes()) {
    for (size_t count = 1; count <= 9; ++count) {
      // Half of the runs are all finite; the other half has specials in some vectors and not in
      // others.
      const unsigned special_every = count % 2 == 0 ? 0 : 100 * static_cast<unsigned>(count);
      std::vector<std::vector<std::byte>> inputs;
      std::vector<float> weights;
      float divisor = 0;
      for (size_t k = 0; k < count; ++k) {
        inputs.push_back(RandomElements<In>(elems, special_every, random));
        weights.push_back(count % 3 == 0 ? static_cast<float>(1 + random() % 7) : 1.0f);
        divisor += weights.back();
      }
      const Result expected = Reference<In, Out>(inputs, weights, divisor, elems);
      for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
        const ForcedTarget forced(target);
        for (size_t rotation = 0; rotation < kMisalignments.size(); ++rotation) {
          const Result got = Fold<In, Out>(inputs, weights, divisor, elems, rotation);
          ASSERT_TRUE(got == expected)
              << hwy::TargetName(target) << ", " << elems << " elements, " << count
              << " inputs, rotation " << rotation << ", non-finite: expected " << expected.nonfinite
              << ", got " << got.nonfinite;
        }
      }
    }
  }
}

TYPED_TEST(FoldMeanTest, EveryPairOfSpecialValuesEqualsTheDefinition) {
  using In = typename TypeParam::In;
  using Out = typename TypeParam::Out;
  const auto special = SpecialBits<In>();
  const size_t elems = special.size() * special.size();
  std::vector<std::vector<std::byte>> inputs(2);
  for (auto& input : inputs) input.resize(elems * sizeof(typename In::Bits));
  for (size_t i = 0; i < elems; ++i) {
    StoreBits<In>(special[i / special.size()], inputs[0].data(), i);
    StoreBits<In>(special[i % special.size()], inputs[1].data(), i);
  }
  const Result expected = Reference<In, Out>(inputs, {1, 1}, 2, elems);
  EXPECT_GT(expected.nonfinite, 0u);
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    EXPECT_TRUE((Fold<In, Out>(inputs, {1, 1}, 2, elems, 0) == expected))
        << hwy::TargetName(target);
  }
}

template <class Element>
class FoldMeanInPlaceTest : public ::testing::Test {};
using Elements = ::testing::Types<Fp32, Fp16, BFloat16, Fp64>;
TYPED_TEST_SUITE(FoldMeanInPlaceTest, Elements);

TYPED_TEST(FoldMeanInPlaceTest, OutMayBeAnyOfTheInputs) {
  constexpr DType kType = kTypeOf<TypeParam>;
  std::mt19937_64 random(4);
  const size_t elems = 77;
  std::vector<std::vector<std::byte>> inputs;
  for (int k = 0; k < 3; ++k) inputs.push_back(RandomElements<TypeParam>(elems, 20, random));
  const std::vector<float> weights = {1, 1, 1};
  const Result expected = Reference<TypeParam, TypeParam>(inputs, weights, 3, elems);
  for (size_t in_place = 0; in_place < inputs.size(); ++in_place) {
    auto copies = inputs;
    std::vector<const void*> pointers;
    for (const auto& copy : copies) pointers.push_back(copy.data());
    const uint64_t nonfinite =
        FoldMean(pointers, weights, 3, kType, kType, copies[in_place].data(), elems);
    EXPECT_EQ(nonfinite, expected.nonfinite);
    EXPECT_TRUE(copies[in_place] == expected.out) << in_place;
  }
}

float FoldFloats(const std::vector<float>& values, float divisor) {
  std::vector<const void*> pointers;
  for (const float& value : values) pointers.push_back(&value);
  const std::vector<float> weights(values.size(), 1.0f);
  float out = 0;
  FoldMean(pointers, weights, divisor, DType::kFloat32, DType::kFloat32, &out, 1);
  return out;
}

TEST(FoldMeanValueTest, SumsInInputOrder) {
  EXPECT_EQ(FoldFloats({1e8f, 1.0f, -1e8f}, 1), 0.0f);
  EXPECT_EQ(FoldFloats({1e8f, -1e8f, 1.0f}, 1), 1.0f);
}

TEST(FoldMeanValueTest, DividesRatherThanMultipliesByTheReciprocal) {
  int differing = 0;
  for (int i = 1; i <= 64; ++i) {
    const auto value = static_cast<float>(i);
    EXPECT_EQ(FoldFloats({value}, 49), value / 49.0f);
    if (value / 49.0f != value * (1.0f / 49.0f)) ++differing;
  }
  EXPECT_GT(differing, 0) << "these values would not tell the two apart";
}

TEST(FoldMeanValueTest, Fp16DoesNotOverflowWhenOnlyTheSumIsTooLarge) {
  const std::vector<uint16_t> in(40, 0x7bff);  // 65504, the largest
  std::vector<uint16_t> out(40);
  const std::vector<const void*> pointers(4, in.data());
  const std::vector<float> weights(4, 1.0f);
  EXPECT_EQ(FoldMean(pointers, weights, 4, DType::kFloat16, DType::kFloat16, out.data(), 40), 0u);
  EXPECT_EQ(out, in);
}

TEST(FoldMeanValueTest, AResultThatRoundsToInfinityIsCounted) {
  const std::vector<float> in(40, 65520.0f);
  std::vector<uint16_t> out(40);
  const std::vector<const void*> pointers = {in.data()};
  const std::vector<float> weights = {1.0f};
  EXPECT_EQ(FoldMean(pointers, weights, 1, DType::kFloat32, DType::kFloat16, out.data(), 40), 40u);
  EXPECT_EQ(out, std::vector<uint16_t>(40, 0x7c00));
}

TEST(FoldMeanValueTest, EachNonFinitePositionIsCountedOnceAndStored) {
  const size_t elems = 71;
  const std::vector<float> weights = {1.0f, 1.0f};
  const std::vector<float> ones(elems, 1.0f);
  for (size_t at = 0; at < elems; ++at) {
    std::vector<float> in = ones;
    in[at] = std::numeric_limits<float>::infinity();
    std::vector<float> out(elems);
    const std::vector<const void*> pointers = {ones.data(), in.data()};
    EXPECT_EQ(FoldMean(pointers, weights, 2, DType::kFloat32, DType::kFloat32, out.data(), elems),
              1u);
    std::vector<float> expected = ones;
    expected[at] = std::numeric_limits<float>::infinity();
    ASSERT_EQ(out, expected) << at;
  }
}

TEST(FoldMeanValueTest, NoElementsNeedNoMemory) {
  const std::vector<const void*> pointers = {nullptr, nullptr};
  const std::vector<float> weights = {1.0f, 1.0f};
  EXPECT_EQ(FoldMean(pointers, weights, 2, DType::kFloat16, DType::kFloat16, nullptr, 0), 0u);
}

}  // namespace
}  // namespace thalweg::reduce_test
