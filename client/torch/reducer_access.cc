#include "client/torch/reducer_access.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace thalweg {
namespace {

// The reducer leaves the division to a hook, but does not tell it the divisor: it is protected, as
// is everything here.
struct Access : c10d::Reducer {
  static constexpr auto kRanks = &Access::div_factor_;
  static constexpr auto kGroup = &Access::process_group_;
  static constexpr auto kParameters = &Access::params_;
  static constexpr auto kFindsUnused = &Access::find_unused_parameters_;
  static constexpr auto kIsStatic = &Access::static_graph_;
  static constexpr auto kUsed = &Access::local_used_map_;
};

}  // namespace

const std::vector<at::Tensor>& ParametersOf(const c10d::Reducer& reducer) {
  return reducer.*Access::kParameters;
}

std::vector<bool> UnusedParameters(const c10d::Reducer& reducer) {
  // What a static graph does not use, it never uses: nothing has been left out of it.
  if (!(reducer.*Access::kFindsUnused) || reducer.*Access::kIsStatic) return {};
  const at::Tensor& used = reducer.*Access::kUsed;
  const auto* const marks = used.const_data_ptr<int32_t>();
  std::vector<bool> unused(used.numel());
  for (size_t i = 0; i < unused.size(); ++i) unused[i] = marks[i] == 0;
  return unused;
}

void ScaleToJoined(const c10d::Reducer& reducer, at::Tensor gradient) {
  const int world = (reducer.*Access::kGroup)->getSize();
  const int joined = reducer.*Access::kRanks;
  // A rank that has left runs no backward pass, which sets the divisor; its gradients are zeros.
  if (joined <= 0 || joined == world) return;
  const c10::NoGradGuard no_grad;
  gradient.mul_(static_cast<double>(world) / joined);
}

}  // namespace thalweg
