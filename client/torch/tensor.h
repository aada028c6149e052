// This header adapts torch tensors to a Session: an element type and bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>

#include "client/core/session.h"
#include "core/base/dtype.h"

namespace thalweg {

// Throws std::runtime_error, whose text begins with "thalweg: ".
[[noreturn]] void Throw(const std::string& what);

// Returns the type in which elements are folded, that of truth values as bytes; nothing: only their
// bytes can be passed on.
std::optional<DType> DTypeOf(at::ScalarType type);

// Throws when `tensor`, called `name` in the message, cannot be reduced: sparse, not on `device`,
// not contiguous, or of another element type than fp32, fp16, bf16 and fp64.
DType CheckReducible(const at::Tensor& tensor, const std::string& name, c10::Device device);

std::span<const std::byte> BytesOf(const at::Tensor& tensor);

// Returns a one-dimensional tensor on the result's memory. The memory is read-only, which torch
// cannot express.
at::Tensor Wrap(ReducedBucket reduced, at::ScalarType type);

}  // namespace thalweg
