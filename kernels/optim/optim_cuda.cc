#include "kernels/optim/optim_cuda.h"

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/launch/status.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

absl::Status CheckAligned(const void* memory, const char* what) {
  const auto past = reinterpret_cast<uintptr_t>(memory) % 16;
  if (past == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("device optimizer: expected the ", what,
                                                 " at a multiple of 16 bytes, got one ", past,
                                                 " bytes behind; give it memory of its own"));
}

absl::Status Check(const OptimPlan& plan, const OptimMemory& memory) {
  THALWEG_RETURN_IF_ERROR(CheckAligned(memory.table, "plan's table"));
  THALWEG_RETURN_IF_ERROR(CheckAligned(memory.workspace.data(), "workspace"));
  if (memory.workspace.size() >= plan.workspace_bytes()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("device optimizer: expected a workspace of ", plan.workspace_bytes(),
                   " bytes, got ", memory.workspace.size(), "; make it anew with the plan"));
}

// Checks the plan for optimizers that correct the bias of moments.
absl::Status CheckMoments(const OptimPlan& plan, const char* name) {
  if (plan.states() >= 2 && plan.counts_steps()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "device ", name, ": expected two states and a number of steps for every tensor, got ",
      plan.states(), " states", plan.counts_steps() ? "" : " and a tensor without",
      "; make the plan of tensors that have both"));
}

// A View is a step's view of the plan's memory. `Prepared` is the prepared data of each tensor.
template <class Prepared>
struct View {
  View(const OptimPlan& plan, const OptimMemory& memory)
      : table{reinterpret_cast<const OptimEntry*>(memory.table), plan.tensors(), plan.granules()},
        param_squares(reinterpret_cast<double*>(memory.workspace.data())),
        update_squares(param_squares + plan.granules()),
        skip(reinterpret_cast<uint32_t*>(update_squares + plan.granules())),
        prepared(reinterpret_cast<Prepared*>(reinterpret_cast<std::byte*>(skip) + kSkipBytes)) {}

  StepWork<Prepared> Step() const { return {table, skip, prepared}; }

  OptimTable table;
  double* param_squares;
  double* update_squares;
  uint32_t* skip;
  Prepared* prepared;
};

template <class Settings, class Prepared>
absl::Status Prepare(CudaStream stream, const View<Prepared>& view, const Settings* settings,
                     const StepInputs& inputs) {
  const PrepareWork<Settings, Prepared> work = {
      view.table,
      settings,
      {inputs.grad_scale, inputs.found_inf, inputs.grad_squares},
      view.skip,
      view.prepared};
  return LaunchStatus(LaunchPrepare(stream, work), "an optimizer's factors");
}

}  // namespace

absl::Status GradSquaresOnDevice(CudaStream stream, const OptimPlan& plan,
                                 const OptimMemory& memory, double* squares, float* found_inf) {
  THALWEG_RETURN_IF_ERROR(Check(plan, memory));
  const View<AdamFactors> view(plan, memory);
  THALWEG_RETURN_IF_ERROR(LaunchStatus(LaunchGradSquares(stream, view.table, view.param_squares),
                                       "squares of gradients"));
  return LaunchStatus(
      LaunchTotal(stream, {view.param_squares, plan.granules(), squares, found_inf}),
      "the sum of squares of gradients");
}

absl::Status StepAdamOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                              const AdamSettings* settings, const StepInputs& inputs) {
  THALWEG_RETURN_IF_ERROR(Check(plan, memory));
  THALWEG_RETURN_IF_ERROR(CheckMoments(plan, "Adam"));
  const View<AdamFactors> view(plan, memory);
  THALWEG_RETURN_IF_ERROR(Prepare(stream, view, settings, inputs));
  return LaunchStatus(LaunchAdamStep(stream, view.Step()), "a step of Adam");
}

absl::Status StepSgdOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                             const SgdSettings* settings, const StepInputs& inputs) {
  THALWEG_RETURN_IF_ERROR(Check(plan, memory));
  const View<SgdFactors> view(plan, memory);
  THALWEG_RETURN_IF_ERROR(Prepare(stream, view, settings, inputs));
  return LaunchStatus(LaunchSgdStep(stream, view.Step()), "a step of SGD");
}

absl::Status StepLambOnDevice(CudaStream stream, const OptimPlan& plan, const OptimMemory& memory,
                              const LambSettings* settings, const StepInputs& inputs) {
  THALWEG_RETURN_IF_ERROR(Check(plan, memory));
  THALWEG_RETURN_IF_ERROR(CheckMoments(plan, "LAMB"));
  const View<LambPrepared> view(plan, memory);
  THALWEG_RETURN_IF_ERROR(Prepare(stream, view, settings, inputs));
  THALWEG_RETURN_IF_ERROR(LaunchStatus(
      LaunchLambMoments(stream, {view.Step(), view.param_squares, view.update_squares}),
      "the moments of LAMB"));
  THALWEG_RETURN_IF_ERROR(LaunchStatus(
      LaunchTrust(stream,
                  {view.table, view.skip, view.prepared, view.param_squares, view.update_squares}),
      "the trust ratios of LAMB"));
  return LaunchStatus(LaunchLambStep(stream, view.Step()), "a step of LAMB");
}

}  // namespace thalweg
