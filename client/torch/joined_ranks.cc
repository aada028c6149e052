#include "client/torch/joined_ranks.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace thalweg {
namespace {

// The reducer leaves the division to a hook, but does not tell it the divisor: it is protected.
struct Divisor : c10d::Reducer {
  static constexpr auto kRanks = &Divisor::div_factor_;
  static constexpr auto kGroup = &Divisor::process_group_;
};

}  // namespace

void ScaleToJoined(const c10d::Reducer& reducer, at::Tensor gradient) {
  const int world = (reducer.*Divisor::kGroup)->getSize();
  const int joined = reducer.*Divisor::kRanks;
  // A rank that has left runs no backward pass, which sets the divisor; its gradients are zeros.
  if (joined <= 0 || joined == world) return;
  const c10::NoGradGuard no_grad;
  gradient.mul_(static_cast<double>(world) / joined);
}

}  // namespace thalweg
