// The optimizer steps of kernels/optim/optim.h on a GPU, for all tensors of a plan whatever their
// types, sizes and addresses: the same bits, given the same factors. A step with a GradScaler is:
//
//   OptimPlan::Make, and copying its table where it has changed
//   StepAdamOnDevice(stream, plan, memory, settings, {scale, found_inf})
//
// and one that looks for infinities itself, or clips:
//
//   GradSquaresOnDevice   gradients → their squares' sum, found_inf
//   StepLambOnDevice      … with both
//   UpdateLossScaleOnDevice
//
// What may differ from step to step is read from device memory when the step runs: settings, scale,
// found_inf, steps done. So nobody waits, and a step that a CUDA graph has recorded goes on when it
// is replayed. Where *found_inf is not 0, nothing changes and no step is counted.
//
// Each phase is one launch in which as many blocks as the GPU holds share all tensors by bytes, in
// accesses of 16 bytes where the arrays of a tensor lie alike with regard to multiples of that, of
// one element elsewhere and for the squares, in whose order neighbouring elements belong to
// neighbouring threads. Launches: 2 for Adam and SGD, of which the first counts steps and computes
// factors; 4 for LAMB; 2 for the squares, 1 for the scale.
//
// All pointers are device memory with the alignment of their elements. Nothing allocates.
// InvalidArgument when the plan does not have what the optimizer keeps, or its memory is not
// aligned or too small; Internal when CUDA cannot launch. Thread-safe; calls that share a workspace
// must be in one stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/optim/factors_scalar.h"
#include "kernels/optim/optim_plan.h"

namespace thalweg {

// Both at multiples of 16 bytes.
struct OptimMemory {
  const std::byte* table = nullptr;  // a copy of OptimPlan::table()
  std::span<std::byte> workspace;    // OptimPlan::workspace_bytes() at least
};

// One number each.
struct StepInputs {
  const float* grad_scale = nullptr;  // gradients are divided by it; null: 1
  const float* found_inf = nullptr;   // null: 0
  // Of GradSquaresOnDevice(), over all tensors that are clipped together. Must not be null where
  // settings have max_grad_norm.
  const double* grad_squares = nullptr;
};

// The sum of the squares of all gradients in float64, in an order that depends on nothing but their
// sizes: within granules that of RunGradSquares(), then every 256th granule, then those sums. Not
// finite when a gradient is not; sets *found_inf, unless null, to 1 then, else to 0.
absl::Status GradSquaresOnDevice(CudaStream stream, const OptimPlan& plan,
                                 const OptimMemory& memory, double* squares, float* found_inf);

// `settings`: those of each group, in device memory. A step of Adam needs two states and counted
// steps, a third state is AMSGrad's; one of SGD has a momentum as its state or none, and takes the
// gradient as momentum in the first step where steps are counted.
absl::Status StepAdamOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                              const AdamSettings* settings, const StepInputs& inputs);
absl::Status StepSgdOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                             const SgdSettings* settings, const StepInputs& inputs);

// Two states and counted steps. Norms are summed up as by GradSquaresOnDevice().
absl::Status StepLambOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                              const LambSettings* settings, const StepInputs& inputs);

struct LossScaleSettings {
  double growth = 2;
  double backoff = 0.5;
  int32_t interval = 2000;  // steps without an infinity, after which the scale grows
  float least = 0x1p-126f;  // so that the inverse is finite
  float most = std::numeric_limits<float>::max();
};

// What torch's GradScaler does after a step, within bounds: multiplies *scale by `backoff` where
// *found_inf is not 0, by `growth` after `interval` steps in a row where it is 0, which
// *growth_tracker counts.
absl::Status UpdateLossScaleOnDevice(CudaStream stream, const LossScaleSettings& settings,
                                     const float* found_inf, float* scale, int32_t* growth_tracker);

}  // namespace thalweg
