// Tensors in the host's memory and in a GPU's, for the tests of the optimizers there.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast/test_util.h"
#include "kernels/launch/test_device.h"
#include "kernels/optim/optim_cuda.h"

namespace thalweg {

inline std::vector<std::byte> RandomOf(DType type, size_t elems, std::mt19937_64& random) {
  if (type == DType::kFloat16) return RandomElements<Fp16>(elems, 0, random);
  if (type == DType::kBFloat16) return RandomElements<BFloat16>(elems, 0, random);
  return RandomElements<Fp32>(elems, 0, random);
}

// kFloat64 as the type of the copy: none.
struct TensorKind {
  size_t elems = 0;
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType copy = DType::kFloat64;
  // Elements behind a multiple of 16 bytes at which arrays begin.
  size_t shift = 0;
  size_t grad_shift = 0;
  uint32_t group = 0;
};

// Sizes around those that kernels treat differently, all types, arrays that lie alike and do not.
inline std::vector<TensorKind> AllKinds() {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  constexpr DType kCopies[] = {DType::kFloat64, DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  constexpr size_t kShifts[][2] = {{0, 0}, {3, 3}, {0, 1}, {5, 2}};
  std::vector<TensorKind> kinds;
  for (size_t elems : {1, 0, 7, 8, 9, 33, 100, 2047, 2049, 4095, 4096, 4113, 9001}) {
    for (size_t k = 0; k < 3; ++k) {
      const size_t i = kinds.size();
      kinds.push_back({elems, kTypes[i % 3], kTypes[i / 3 % 3], kCopies[i % 4],
                       kShifts[i % 5 % 4][0], kShifts[i % 5 % 4][1], static_cast<uint32_t>(i % 2)});
    }
  }
  return kinds;
}

// One array in both memories.
class TwinArray {
 public:
  TwinArray(std::vector<std::byte> content, size_t misalignment)
      : host_(std::move(content)), device_(host_, misalignment) {}

  std::byte* Host() { return host_.data(); }
  std::byte* Device() const { return device_.Data(); }
  const std::vector<std::byte>& HostContent() const { return host_; }
  bool IsEqual() const { return device_.Content() == host_; }
  void Fill(std::vector<std::byte> content) {
    host_ = std::move(content);
    device_.Fill(host_);
  }

 private:
  std::vector<std::byte> host_;
  DeviceBuffer device_;
};

class TwinTensor {
 public:
  TwinTensor(const TensorKind& kind, size_t states, std::mt19937_64& random)
      : kind_(kind),
        param_(RandomOf(kind.param, kind.elems, random), kind.shift * SizeOf(kind.param)),
        grad_(RandomOf(kind.grad, kind.elems, random), kind.grad_shift * SizeOf(kind.grad)),
        copy_(std::vector<std::byte>(CopyBytes(kind)), kind.shift * CopyBytes(kind, 1)),
        step_(std::vector<std::byte>(sizeof(float)), 0) {
    for (size_t k = 0; k < states; ++k) {
      states_.emplace_back(std::vector<std::byte>(kind.elems * sizeof(float)),
                           kind.shift * sizeof(float));
    }
  }

  OptimTensor OnHost() {
    OptimTensor tensor = Common();
    tensor.param = param_.Host();
    tensor.grad = grad_.Host();
    for (size_t k = 0; k < states_.size(); ++k) {
      tensor.states[k] = reinterpret_cast<float*>(states_[k].Host());
    }
    tensor.copy = HasCopy() ? copy_.Host() : nullptr;
    return tensor;
  }
  DeviceTensor OnDevice() {
    DeviceTensor tensor;
    static_cast<OptimTensor&>(tensor) = Common();
    tensor.param = param_.Device();
    tensor.grad = grad_.Device();
    for (size_t k = 0; k < states_.size(); ++k) {
      tensor.states[k] = reinterpret_cast<float*>(states_[k].Device());
    }
    tensor.copy = HasCopy() ? copy_.Device() : nullptr;
    tensor.step = reinterpret_cast<float*>(step_.Device());
    tensor.group = kind_.group;
    return tensor;
  }

  const TensorKind& kind() const { return kind_; }
  float& HostStep() { return *reinterpret_cast<float*>(step_.Host()); }
  void NewGrad(std::mt19937_64& random) { grad_.Fill(RandomOf(kind_.grad, kind_.elems, random)); }
  TwinArray& grad() { return grad_; }

  // Returns whether both memories have the same bytes.
  bool IsEqual() const {
    for (const TwinArray& state : states_) {
      if (!state.IsEqual()) return false;
    }
    return param_.IsEqual() && grad_.IsEqual() && copy_.IsEqual() && step_.IsEqual();
  }

 private:
  static size_t CopyBytes(const TensorKind& kind) { return CopyBytes(kind, kind.elems); }
  static size_t CopyBytes(const TensorKind& kind, size_t elems) {
    return kind.copy == DType::kFloat64 ? 0 : elems * SizeOf(kind.copy);
  }
  bool HasCopy() const { return kind_.copy != DType::kFloat64; }
  OptimTensor Common() const {
    OptimTensor tensor;
    tensor.elems = kind_.elems;
    tensor.param_type = kind_.param;
    tensor.grad_type = kind_.grad;
    if (HasCopy()) tensor.copy_type = kind_.copy;
    return tensor;
  }

  TensorKind kind_;
  TwinArray param_;
  TwinArray grad_;
  TwinArray copy_;
  TwinArray step_;
  std::vector<TwinArray> states_;
};

}  // namespace thalweg
