// UnscaledGrads converts gradients of half-precision parameters to those of their float32 masters.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace thalweg {

// Returns float32 copies of `grads`, each element divided by `scale` (multiplied by 1/scale,
// rounded to float32), and whether all of `grads` are finite; in one pass, in torch's threads.
// Throws NotFusable unless all are dense fp16 or bf16 on the CPU.
std::pair<std::vector<at::Tensor>, bool> UnscaledGrads(const std::vector<at::Tensor>& grads,
                                                       double scale);

}  // namespace thalweg
