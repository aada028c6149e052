#include "kernels/reduce/reduce_cuda.h"

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"
#include "kernels/launch/test_device.h"
#include "kernels/reduce/reduce.h"

namespace thalweg::reduce_cuda_test {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

template <class InElement, class OutElement>
struct Types {
  using In = InElement;
  using Out = OutElement;
};

struct Result {
  Bytes out;
  uint64_t nonfinite = 0;
  bool operator==(const Result&) const = default;
};

struct Fold {
  std::vector<Bytes> inputs;
  std::vector<float> weights;
  float divisor = 1;
  size_t elems = 0;
};

template <class In>
Fold RandomFold(size_t elems, size_t count, unsigned special_every, std::mt19937_64& random) {
  Fold fold;
  fold.elems = elems;
  fold.divisor = 0;
  for (size_t k = 0; k < count; ++k) {
    fold.inputs.push_back(RandomElements<In>(elems, special_every, random));
    fold.weights.push_back(count % 3 == 0 ? static_cast<float>(1 + random() % 7) : 1.0f);
    fold.divisor += fold.weights.back();
  }
  return fold;
}

template <class In, class Out>
Result OnCpu(const Fold& fold) {
  Result result;
  result.out.resize(fold.elems * sizeof(typename Out::Bits));
  std::vector<const void*> pointers;
  for (const Bytes& input : fold.inputs) pointers.push_back(input.data());
  result.nonfinite = FoldMean(pointers, fold.weights, fold.divisor, kTypeOf<In>, kTypeOf<Out>,
                              result.out.data(), fold.elems);
  return result;
}

// The arrays begin `shift` elements after a multiple of 256 bytes, input k `spread`·k more.
template <class In, class Out>
Result OnDevice(const Fold& fold, size_t shift, size_t spread) {
  std::vector<DeviceBuffer> inputs;
  std::vector<const void*> pointers;
  for (size_t k = 0; k < fold.inputs.size(); ++k) {
    inputs.emplace_back(fold.inputs[k], (shift + spread * k) * sizeof(typename In::Bits));
    pointers.push_back(inputs.back().Data());
  }
  const DeviceBuffer out(fold.elems * sizeof(typename Out::Bits),
                         shift * sizeof(typename Out::Bits));
  const DeviceBuffer nonfinite(std::vector<uint64_t>{1000});
  const absl::Status status =
      FoldMeanOnDevice(nullptr, pointers, fold.weights, fold.divisor, kTypeOf<In>, kTypeOf<Out>,
                       out.Data(), fold.elems, nonfinite.As<uint64_t>());
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(FinishDevice().ok());
  return {out.Content(), nonfinite.ContentAs<uint64_t>()[0] - 1000};
}

template <class Types>
class FoldOnDeviceTest : public DeviceTest {};
using AllTypes = ::testing::Types<Types<Fp32, Fp32>, Types<Fp16, Fp16>, Types<BFloat16, BFloat16>,
                                  Types<Fp64, Fp64>, Types<Fp32, Fp16>, Types<Fp32, BFloat16>>;
TYPED_TEST_SUITE(FoldOnDeviceTest, AllTypes);

TYPED_TEST(FoldOnDeviceTest, EqualsTheCpuForAnySizeAddressAndNumber) {
  using In = typename TypeParam::In;
  using Out = typename TypeParam::Out;
  std::mt19937_64 random(31);
  // The sizes are around the blocks of either walk: 256 threads with 8 elements, or 2 packs of 2 to
  // 8.
  for (size_t elems : {0, 1, 2, 7, 8, 9, 31, 33, 255, 1030, 2047, 2049, 4097, 4120}) {
    for (size_t count : {1, 2, 3, 8}) {
      const Fold fold = RandomFold<In>(elems, count, count % 2 == 0 ? 0 : 50, random);
      const Result expected = OnCpu<In, Out>(fold);
      for (size_t shift : {0, 1, 3}) {
        for (size_t spread : {0, 1}) {
          ASSERT_TRUE((OnDevice<In, Out>(fold, shift, spread) == expected))
              << elems << " elements, " << count << " inputs, shift " << shift << ", spread "
              << spread;
        }
      }
    }
  }
}

TYPED_TEST(FoldOnDeviceTest, EveryPairOfSpecialValuesEqualsTheCpu) {
  using In = typename TypeParam::In;
  using Out = typename TypeParam::Out;
  const auto special = SpecialBits<In>();
  Fold fold;
  fold.elems = special.size() * special.size();
  fold.inputs.resize(2, Bytes(fold.elems * sizeof(typename In::Bits)));
  fold.weights = {1, 1};
  fold.divisor = 2;
  for (size_t i = 0; i < fold.elems; ++i) {
    StoreBits<In>(special[i / special.size()], fold.inputs[0].data(), i);
    StoreBits<In>(special[i % special.size()], fold.inputs[1].data(), i);
  }
  const Result expected = OnCpu<In, Out>(fold);
  EXPECT_GT(expected.nonfinite, 0u);
  for (size_t spread : {0, 1}) {
    EXPECT_TRUE((OnDevice<In, Out>(fold, 0, spread) == expected)) << spread;
  }
}

TYPED_TEST(FoldOnDeviceTest, AsManyInputsAsAllowedAreSummedInOrder) {
  using In = typename TypeParam::In;
  using Out = typename TypeParam::Out;
  std::mt19937_64 random(32);
  const Fold fold = RandomFold<In>(300, kMaxDeviceFoldInputs, 0, random);
  EXPECT_TRUE((OnDevice<In, Out>(fold, 0, 0) == OnCpu<In, Out>(fold)));
}

template <class Element>
class FoldOnDeviceInPlaceTest : public DeviceTest {};
using Elements = ::testing::Types<Fp32, Fp16, BFloat16, Fp64>;
TYPED_TEST_SUITE(FoldOnDeviceInPlaceTest, Elements);

TYPED_TEST(FoldOnDeviceInPlaceTest, OutMayBeAnyOfTheInputs) {
  constexpr DType kType = kTypeOf<TypeParam>;
  std::mt19937_64 random(33);
  const Fold fold = RandomFold<TypeParam>(5000, 3, 20, random);
  const Result expected = OnCpu<TypeParam, TypeParam>(fold);
  for (size_t in_place = 0; in_place < 3; ++in_place) {
    std::vector<DeviceBuffer> inputs;
    std::vector<const void*> pointers;
    for (const Bytes& input : fold.inputs) {
      inputs.emplace_back(input, 0);
      pointers.push_back(inputs.back().Data());
    }
    const DeviceBuffer nonfinite(std::vector<uint64_t>{0});
    ASSERT_TRUE(FoldMeanOnDevice(nullptr, pointers, fold.weights, fold.divisor, kType, kType,
                                 inputs[in_place].Data(), fold.elems, nonfinite.As<uint64_t>())
                    .ok());
    EXPECT_TRUE(inputs[in_place].Content() == expected.out) << in_place;
    EXPECT_EQ(nonfinite.ContentAs<uint64_t>()[0], expected.nonfinite);
  }
}

TEST(FoldOnDeviceArgumentsTest, WhatIsNotSupportedIsRefused) {
  const std::vector<const void*> none(kMaxDeviceFoldInputs + 1);
  const std::vector<float> weights(none.size(), 1.0f);
  const auto fold = [&](size_t inputs, size_t weight_count, DType in, DType out) {
    return FoldMeanOnDevice(nullptr, std::span(none).first(inputs),
                            std::span(weights).first(weight_count), 1, in, out, nullptr, 0,
                            nullptr);
  };
  for (auto [inputs, weight_count] : {std::pair{0, 0}, {65, 65}, {2, 3}}) {
    const absl::Status status = fold(static_cast<size_t>(inputs), static_cast<size_t>(weight_count),
                                     DType::kFloat32, DType::kFloat32);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("got " + std::to_string(inputs)));
  }
  for (auto [in, out] : {std::pair{DType::kFloat16, DType::kFloat32},
                         {DType::kFloat32, DType::kFloat64},
                         {static_cast<DType>(10), static_cast<DType>(10)}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(fold(1, 1, in, out)));
  }
}

}  // namespace
}  // namespace thalweg::reduce_cuda_test
