// What c10d's calls say of tensors and operations, as collectives need it. All throw
// std::runtime_error for what is not supported, by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/fold.h"

namespace thalweg {

const char* NameOf(c10d::ReduceOp::RedOpType op);  // "SUM"
Fold FoldOf(c10d::ReduceOp::RedOpType op, at::ScalarType type);
// Returns what values are multiplied with before they are folded.
double FactorOf(const c10d::ReduceOp& op);

// `what` is the collective's name.
void CheckTensor(const at::Tensor& tensor, const char* what);
// Checks tensors of which each of the first goes into one of the others.
void CheckPairs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                const char* what);
// Also throws where `given` and `got` are not all of one type.
void CheckOneType(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& got,
                  const char* what);
const at::Tensor& Only(const std::vector<at::Tensor>& tensors, const char* what);

std::span<std::byte> WritableBytesOf(const at::Tensor& tensor);
int64_t LargestOf(const std::vector<at::Tensor>& tensors);  // number of elements
// Appends what is missing for every tensor to have `elems` elements.
std::vector<at::Tensor> Padded(const std::vector<at::Tensor>& tensors, int64_t elems);
// Returns a real tensor on the memory of a complex one, whose numbers are folded as pairs.
at::Tensor AsReal(const at::Tensor& tensor);
// Returns the part of a tensor that `like`, of the same sizes, has in memory: one element along
// each dimension in which that is expanded.
at::Tensor WithoutRepeats(at::Tensor tensor, const at::Tensor& like);

}  // namespace thalweg
