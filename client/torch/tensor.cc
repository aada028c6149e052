#include "client/torch/tensor.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {

void Throw(const std::string& what) { throw std::runtime_error(absl::StrCat("thalweg: ", what)); }

std::optional<DType> DTypeOf(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    case at::kByte:
    case at::kBool:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    default:
      return std::nullopt;
  }
}

DType CheckReducible(const at::Tensor& tensor, const std::string& name, c10::Device device) {
  if (tensor.is_sparse()) {
    Throw(absl::StrCat(name,
                       " is sparse, which is not supported: use dense gradients (for "
                       "torch.nn.Embedding, sparse=False)"));
  }
  if (tensor.device() != device) {
    Throw(absl::StrCat(name, " is on ", tensor.device().str(), ", expected ", device.str(),
                       ": keep it on the device on which the session was connected"));
  }
  if (!tensor.is_contiguous()) Throw(absl::StrCat(name, " is not contiguous"));
  const std::optional<DType> type = DTypeOf(tensor.scalar_type());
  if (type && IsFloat(*type)) return *type;
  Throw(absl::StrCat(name, " is of type ", c10::toString(tensor.scalar_type()),
                     ", expected Float, Half, BFloat16 or Double"));
}

std::span<const std::byte> BytesOf(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor Wrap(ReducedBucket reduced, at::ScalarType type) {
  const auto elems = static_cast<int64_t>(reduced.bytes.size() / c10::elementSize(type));
  if (elems == 0) return at::empty({0}, at::TensorOptions().dtype(type));
  void* data = const_cast<std::byte*>(reduced.bytes.data());
  return at::from_blob(
      data, {elems}, [owner = std::move(reduced.owner)](void*) mutable { owner.reset(); },
      at::TensorOptions().dtype(type));
}

}  // namespace thalweg
