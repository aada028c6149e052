// ScaleToJoined serves DistributedDataParallel.join(divide_by_initial_world_size=False).
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace thalweg {

// Multiplies `gradient`, in place, by all ranks / the ranks that torch divides by in this backward
// pass. The mean of such gradients over all ranks is the mean over the ranks that still train, as
// those that have left contribute zeros. Call it in a communication hook of `reducer`.
void ScaleToJoined(const c10d::Reducer& reducer, at::Tensor gradient);

}  // namespace thalweg
