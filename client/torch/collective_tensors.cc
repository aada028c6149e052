#include "client/torch/collective_tensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "client/torch/tensor.h"

namespace thalweg {

using c10d::ReduceOp;

const char* NameOf(ReduceOp::RedOpType op) {
  constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return op < std::size(kNames) ? kNames[op] : "an unknown operation";
}

Fold FoldOf(ReduceOp::RedOpType op, at::ScalarType type) {
  const bool is_bool = type == at::kBool;
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM:
      return is_bool ? Fold::kBitOr : Fold::kSum;
    case ReduceOp::AVG:
      return Fold::kMean;
    case ReduceOp::PRODUCT:
      return is_bool ? Fold::kBitAnd : Fold::kProduct;
    case ReduceOp::MIN:
      return Fold::kMin;
    case ReduceOp::MAX:
      return Fold::kMax;
    case ReduceOp::BAND:
      return Fold::kBitAnd;
    case ReduceOp::BOR:
      return Fold::kBitOr;
    case ReduceOp::BXOR:
      return Fold::kBitXor;
    default:
      Throw(absl::StrCat("reduce operation ", static_cast<int>(op), " is not supported"));
  }
}

double FactorOf(const ReduceOp& op) {
  if (op != ReduceOp::PREMUL_SUM) return 1;
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (factor == nullptr) Throw("PREMUL_SUM comes without a factor");
  return factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                         : factor->double_factor;
}

void CheckTensor(const at::Tensor& tensor, const char* what) {
  if (tensor.is_sparse()) Throw(absl::StrCat(what, " of a sparse tensor is not supported"));
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    Throw(absl::StrCat(what, " of a tensor on ", tensor.device().str(), " is not supported"));
  }
}

void CheckPairs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                const char* what) {
  if (inputs.size() != outputs.size()) {
    Throw(absl::StrCat(what, " of ", inputs.size(), " tensors into ", outputs.size()));
  }
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) CheckTensor(tensor, what);
  }
}

void CheckOneType(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& got,
                  const char* what) {
  const at::Tensor* first = nullptr;
  for (const auto* tensors : {&given, &got}) {
    for (const at::Tensor& tensor : *tensors) {
      if (first == nullptr) first = &tensor;
      if (tensor.scalar_type() != first->scalar_type()) {
        Throw(absl::StrCat(what, " of ", c10::toString(first->scalar_type()), " and ",
                           c10::toString(tensor.scalar_type()), ": expected tensors of one type"));
      }
    }
  }
}

const at::Tensor& Only(const std::vector<at::Tensor>& tensors, const char* what) {
  if (tensors.size() != 1) {
    Throw(absl::StrCat(what, " takes one tensor, got ", tensors.size()));
  }
  CheckTensor(tensors[0], what);
  return tensors[0];
}

std::span<std::byte> WritableBytesOf(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

int64_t LargestOf(const std::vector<at::Tensor>& tensors) {
  int64_t largest = 0;
  for (const at::Tensor& tensor : tensors) largest = std::max(largest, tensor.numel());
  return largest;
}

std::vector<at::Tensor> Padded(const std::vector<at::Tensor>& tensors, int64_t elems) {
  std::vector<at::Tensor> padded;
  for (const at::Tensor& tensor : tensors) {
    padded.push_back(tensor);
    if (tensor.numel() < elems) {
      padded.push_back(at::zeros({elems - tensor.numel()}, tensor.options()));
    }
  }
  return padded;
}

at::Tensor AsReal(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

at::Tensor WithoutRepeats(at::Tensor tensor, const at::Tensor& like) {
  for (int64_t dim = 0; dim < like.dim(); ++dim) {
    if (like.stride(dim) == 0 && like.size(dim) > 1) tensor = tensor.narrow(dim, 0, 1);
  }
  return tensor;
}

}  // namespace thalweg
