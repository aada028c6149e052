// This header has the optimizer steps of kernels/optim/optim.h on a GPU, for all tensors of a plan,
// of any types, sizes and addresses: the same bits, given the same factors. A step with a
// GradScaler is:
//
//   OptimPlan::Make, and copying its table where it has changed
//   StepAdamOnDevice(stream, plan, memory, settings, {scale, found_inf})
//
// A step that looks for infinities itself, or clips, is:
//
//   GradSquaresOnDevice   gradients → their squares' sum, found_inf
//   StepLambOnDevice      … with both
//
// Values that may differ from step to step are read from device memory when the step runs:
// settings, scale, found_inf, steps done. Thus nothing waits, and a step that a CUDA graph has
// recorded continues when it is replayed. Where *found_inf is not 0, nothing changes and no step is
// counted.
//
// Each phase is one launch in which as many blocks as the GPU holds share all tensors by bytes.
// Accesses are of 16 bytes where the arrays of a tensor have equal distances from multiples of
// that. They are of one element elsewhere, and for the squares, in whose order neighbouring
// elements belong to neighbouring threads. Adam and SGD take 2 launches, of which the first counts
// steps and computes factors; LAMB takes 4, the squares 2, the scale 1.
//
// All pointers are device memory with the alignment of their elements. Nothing allocates. Functions
// return InvalidArgument when the plan lacks states that the optimizer needs, or its memory is not
// aligned or too small; Internal when CUDA cannot launch. Thread-safe; calls that share a workspace
// must be in one stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/launch/stream.h"
#include "kernels/optim/factors_scalar.h"
#include "kernels/optim/optim_plan.h"

namespace thalweg {

// Both are at multiples of 16 bytes.
struct OptimMemory {
  const std::byte* table = nullptr;  // a copy of OptimPlan::table()
  std::span<std::byte> workspace;    // at least OptimPlan::workspace_bytes()
};

// Each points to one number.
struct StepInputs {
  const float* grad_scale = nullptr;  // gradients are divided by it; null: 1
  const float* found_inf = nullptr;   // null: 0
  // The result of GradSquaresOnDevice(), over all tensors that are clipped together. Must not be
  // null where settings have max_grad_norm.
  const double* grad_squares = nullptr;
};

// Computes the sum of the squares of all gradients in float64, in an order that depends only on
// their sizes: within granules that of RunGradSquares(), then every 256th granule, then those sums.
// The sum is not finite when a gradient is not; *found_inf, unless null, is then set to 1, else to
// 0.
absl::Status GradSquaresOnDevice(CudaStream stream, const OptimPlan& plan,
                                 const OptimMemory& memory, double* squares, float* found_inf);

// `settings` has those of each group, in device memory. A step of Adam needs two states and counted
// steps, and a third state for AMSGrad. A step of SGD has a momentum as its state or none, and uses
// the gradient as momentum in the first step where steps are counted.
absl::Status StepAdamOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                              const AdamSettings* settings, const StepInputs& inputs);
absl::Status StepSgdOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                             const SgdSettings* settings, const StepInputs& inputs);

// Needs two states and counted steps. Norms are summed as by GradSquaresOnDevice().
absl::Status StepLambOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                              const LambSettings* settings, const StepInputs& inputs);

}  // namespace thalweg
