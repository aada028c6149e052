// This header has optimizer steps on processors: each reads parameters, gradients and state once
// and writes them once, in one pass over all tensors. docs/optim.md has the formulas and the bytes.
//
// Nothing here has threads. A caller adds the tensors to a FlatIndex and calls, from any number of
// threads, for ranges [begin, end) that together cover [0, index.Size()): results are the same bits
// for any ranges. Parameters and gradients may be fp32, fp16 or bf16; state is fp32; everything is
// computed in fp32, in the arithmetic of update_scalar.h. Parameters and gradients may lie at any
// address. Arrays must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/dtype.h"
#include "kernels/optim/flat_index.h"
#include "kernels/optim/update_scalar.h"

namespace thalweg {

struct OptimTensor {
  void* param = nullptr;
  const void* grad = nullptr;
  // The state of each optimizer: moments, in the order stated at its function below; null where
  // unused.
  float* states[3] = {};
  // The new parameter is also stored here, rounded, unless null. `param` is then a master.
  void* copy = nullptr;
  uint64_t elems = 0;
  DType param_type = DType::kFloat32;
  DType grad_type = DType::kFloat32;
  DType copy_type = DType::kFloat32;
};

// Returns how many bytes a step moves per element of `tensor`, each read and each write counted.
uint64_t StepBytes(const OptimTensor& tensor);

struct AdamTensor : OptimTensor {
  AdamFactors factors;
};

// Runs Adam. The states are the first moment, the second moment, and with AMSGrad the largest
// second moment so far.
void RunAdam(std::span<const AdamTensor> tensors, const FlatIndex& index, uint64_t begin,
             uint64_t end);

struct SgdTensor : OptimTensor {
  SgdFactors factors;
};

// Runs SGD. The state is the momentum, or none.
void RunSgd(std::span<const SgdTensor> tensors, const FlatIndex& index, uint64_t begin,
            uint64_t end);

struct LambTensor : OptimTensor {
  LambFactors factors;
  float rate = 0;  // lr; in the second phase times the trust ratio
};

// Sums the squares of the parameters' gradients in float64 in the order of the elements: sums[g] is
// that of granule g of `index`. Non-finite elements make it non-finite.
void RunGradSquares(std::span<const OptimTensor> tensors, const FlatIndex& index, uint64_t begin,
                    uint64_t end, double* sums);

// Does the first phase of LAMB: moments; and for each granule the squares of parameter and update,
// unless the pointers are null. The states are the first moment and the second moment.
void RunLambMoments(std::span<const LambTensor> tensors, const FlatIndex& index, uint64_t begin,
                    uint64_t end, double* param_squares, double* update_squares);

// Does the second phase, after the first has completed: parameters, with `rate`.
void RunLambStep(std::span<const LambTensor> tensors, const FlatIndex& index, uint64_t begin,
                 uint64_t end);

}  // namespace thalweg
