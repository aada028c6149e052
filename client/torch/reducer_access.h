// Reads what DistributedDataParallel's reducer keeps to itself, at the places where the torch that
// this module is compiled against has it: Python loads the module that fits.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

namespace thalweg {

// Returns the parameters whose gradients the reducer averages, in its order: those that required
// gradients when the module was built, whatever has been frozen or replaced since.
const std::vector<at::Tensor>& ParametersOf(const c10d::Reducer& reducer);

// Returns the numbers, among ParametersOf, of those that have taken no part in this backward pass
// on this rank, by number: find_unused_parameters finds them, and torch discards the result of one
// that has taken part on no rank. Without it there are none. For a hook of `reducer`.
std::vector<bool> UnusedParameters(const c10d::Reducer& reducer);

// Multiplies `gradient`, in place, by all ranks / the ranks that torch divides by in this backward
// pass. The mean of such gradients over all ranks is the mean over the ranks that still train, as
// those that have left contribute zeros. Call it in a communication hook of `reducer`; it serves
// join(divide_by_initial_world_size=False).
void ScaleToJoined(const c10d::Reducer& reducer, at::Tensor gradient);

}  // namespace thalweg
