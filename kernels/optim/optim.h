// Optimizer steps on processors: each reads parameters, gradients and state once and writes them
// once, in one pass over all tensors. docs/optim.md has the formulas and the bytes.
//
// Nothing here has threads. A caller adds the tensors to a FlatIndex and calls, from as many
// threads as it likes, for stretches [begin, end) that together cover [0, index.Size()): results
// are the same bits however it is cut. Parameters and gradients may be fp32, fp16 or bf16; state is
// fp32; everything is computed in fp32, in the arithmetic of update_scalar.h. Parameters and
// gradients may lie at any address. Arrays must not overlap.
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
  // What each optimizer keeps: moments, in the order of its function below; null where unused.
  float* states[3] = {};
  // Where the new parameter is stored as well, rounded; null: nowhere. `param` is then a master.
  void* copy = nullptr;
  uint64_t elems = 0;
  int32_t grad_exponent = 0;  // `grad` is 2^grad_exponent times the parameter's gradient
  DType param_type = DType::kFloat32;
  DType grad_type = DType::kFloat32;
  DType copy_type = DType::kFloat32;
};

// How many bytes a step moves per element of `tensor`, each read and each write counted.
uint64_t StepBytes(const OptimTensor& tensor);

struct AdamTensor : OptimTensor {
  AdamFactors factors;
};

// states: first moment, second moment, and with AMSGrad the largest second moment so far.
void RunAdam(std::span<const AdamTensor> tensors, const FlatIndex& index, uint64_t begin,
             uint64_t end);

struct SgdTensor : OptimTensor {
  SgdFactors factors;
};

// states: the momentum, or none.
void RunSgd(std::span<const SgdTensor> tensors, const FlatIndex& index, uint64_t begin,
            uint64_t end);

struct LambTensor : OptimTensor {
  LambFactors factors;
  float rate = 0;  // lr, by the second phase times the trust ratio
};

// Sums of the squares of the parameters' gradients in float64, whose order is that of the elements:
// sums[g] is that of granule g of `index`. Elements that are not finite make it not finite.
void RunGradSquares(std::span<const OptimTensor> tensors, const FlatIndex& index, uint64_t begin,
                    uint64_t end, double* sums);

// The first phase of LAMB: moments; and of each granule the squares of parameter and update, unless
// the pointers are null. states: first moment, second moment.
void RunLambMoments(std::span<const LambTensor> tensors, const FlatIndex& index, uint64_t begin,
                    uint64_t end, double* param_squares, double* update_squares);

// The second, once the first is through: parameters, with `rate`.
void RunLambStep(std::span<const LambTensor> tensors, const FlatIndex& index, uint64_t begin,
                 uint64_t end);

}  // namespace thalweg
