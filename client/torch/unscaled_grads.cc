#include "client/torch/unscaled_grads.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "client/torch/in_parallel.h"
#include "client/torch/tensor_group.h"
#include "kernels/cast/cast.h"

namespace thalweg {
namespace {

constexpr uint64_t kBytesPerElem = 2 + 4;  // read 2, write 4

struct Array {
  const std::byte* from;
  std::byte* to;
  DType type;
};

void Check(const at::Tensor& grad) {
  const bool is_half = grad.scalar_type() == at::kHalf || grad.scalar_type() == at::kBFloat16;
  if (grad.layout() == at::kStrided && grad.is_cpu() && is_half &&
      !grad.unsafeGetTensorImpl()->is_python_dispatch()) {
    return;
  }
  throw NotFusable(absl::StrCat("thalweg: a gradient is ", c10::toString(grad.scalar_type()),
                                " on ", grad.device().str(),
                                ", expected dense Half or BFloat16 on the CPU"));
}

// The Python object and the argument refer to the tensor.
constexpr size_t kOwnReferences = 2;

const std::optional<at::Tensor> kNoMemory;

// Returns `memory` if a gradient like `dense` can lie there, otherwise new memory.
at::Tensor FloatsLike(const at::Tensor& dense, const std::optional<at::Tensor>& memory) {
  if (memory && memory->use_count() == kOwnReferences && memory->storage().use_count() == 1 &&
      memory->scalar_type() == at::kFloat && memory->is_cpu() && memory->sizes() == dense.sizes() &&
      memory->strides() == dense.strides()) {
    return *memory;
  }
  return at::empty_strided(dense.sizes(), dense.strides(), dense.options().dtype(at::kFloat));
}

}  // namespace

std::pair<std::vector<at::Tensor>, bool> UnscaledGrads(
    const std::vector<at::Tensor>& grads, double scale,
    const std::vector<std::optional<at::Tensor>>& memory) {
  c10::NoGradGuard no_grad;
  for (const at::Tensor& grad : grads) Check(grad);
  std::vector<at::Tensor> keep_alive;
  std::vector<at::Tensor> unscaled;
  std::vector<Array> arrays;
  FlatIndex index;
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& grad = grads[i];
    const at::Tensor plain = grad.is_neg() ? grad.resolve_neg() : grad;
    const at::Tensor& dense =
        keep_alive.emplace_back(plain.is_non_overlapping_and_dense() ? plain : plain.contiguous());
    const at::Tensor& out =
        unscaled.emplace_back(FloatsLike(dense, i < memory.size() ? memory[i] : kNoMemory));
    arrays.push_back({static_cast<const std::byte*>(dense.const_data_ptr()),
                      static_cast<std::byte*>(out.mutable_data_ptr()),
                      dense.scalar_type() == at::kHalf ? DType::kFloat16 : DType::kBFloat16});
    index.Add(static_cast<uint64_t>(dense.numel()), kBytesPerElem);
  }
  const auto factor = static_cast<float>(1 / scale);
  std::atomic<bool> is_finite = true;
  InParallel(index, [&](uint64_t begin, uint64_t end) {
    index.ForEach(begin, end, [&](const FlatIndex::Piece& piece) {
      const Array& array = arrays[piece.tensor];
      if (!WidenScaled(array.type, array.from + piece.first * 2, factor,
                       array.to + piece.first * sizeof(float), piece.last - piece.first)) {
        is_finite.store(false, std::memory_order_relaxed);
      }
    });
  });
  return {std::move(unscaled), is_finite};
}

}  // namespace thalweg
