// UnscaledGrads converts gradients of half-precision parameters to those of their float32 masters.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

namespace thalweg {

// Returns float32 copies of `grads`, each element divided by `scale` (multiplied by 1/scale,
// rounded to float32), and whether all of `grads` are finite; in one pass, in torch's threads. A
// copy lies in its tensor of `memory`, if that has the same form and nobody else refers to it but
// one Python object: the system needs as long to clear new memory as the pass to fill it. Throws
// NotFusable unless all are dense fp16 or bf16 on the CPU.
std::pair<std::vector<at::Tensor>, bool> UnscaledGrads(
    const std::vector<at::Tensor>& grads, double scale,
    const std::vector<std::optional<at::Tensor>>& memory);

}  // namespace thalweg
