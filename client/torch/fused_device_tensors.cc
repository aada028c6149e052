#include "client/torch/fused_device_tensors.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

// The CPU, where tests emulate kernels, has no streams.
CudaStream CurrentStream(at::Device device) {
  if (device.is_cpu()) return nullptr;
  const c10::impl::VirtualGuardImpl streams(device.type());
  return static_cast<CudaStream>(streams.getStream(device).native_handle());
}

void ThrowIfFailed(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(absl::StrCat("thalweg: ", status.message()));
}

at::Tensor Memory(uint64_t bytes, at::Device device) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(device).dtype(at::kByte));
}

std::byte* FirstByteOf(const at::Tensor& memory) {
  return static_cast<std::byte*>(memory.mutable_data_ptr());
}

// A Numbers holds tensors of one number in the form that kernels read, and keeps them alive. It may
// be destroyed once the kernels that read them are queued: torch reuses memory in the stream's
// order.
class Numbers {
 public:
  explicit Numbers(at::Device device) : device_(device) {}

  const float* Float(const std::optional<at::Tensor>& number, const char* name) {
    return Read(number, name, at::kFloat).const_data_ptr<float>();
  }
  const double* Double(const std::optional<at::Tensor>& number, const char* name) {
    return Read(number, name, at::kDouble).const_data_ptr<double>();
  }

 private:
  const at::Tensor& Read(const std::optional<at::Tensor>& number, const char* name,
                         at::ScalarType type) {
    if (number->numel() != 1) {
      throw std::invalid_argument(
          absl::StrCat("thalweg: ", name, " has ", number->numel(), " elements, expected one"));
    }
    return kept_.emplace_back(number->to(device_, type, /*non_blocking=*/true));
  }

  const at::Device device_;
  std::vector<at::Tensor> kept_;
};

}  // namespace

const std::byte* FusedDeviceTensors::Sent::Send(std::span<const std::byte> bytes,
                                                at::Device device) {
  if (!memory_.defined() || !std::equal(bytes.begin(), bytes.end(), bytes_.begin(), bytes_.end())) {
    // Nothing writes to this host memory before the copy is done, so nothing has to wait for the
    // copy.
    const at::Tensor host =
        at::empty({static_cast<int64_t>(bytes.size())},
                  at::TensorOptions().dtype(at::kByte).pinned_memory(!device.is_cpu()));
    std::copy(bytes.begin(), bytes.end(), FirstByteOf(host));
    at::Tensor memory = host.to(device, /*non_blocking=*/true);
    // Both or neither: the next try after an error must not take the last step's table.
    std::vector<std::byte> sent(bytes.begin(), bytes.end());
    memory_ = std::move(memory);
    bytes_ = std::move(sent);
  }
  return FirstByteOf(memory_);
}

FusedDeviceTensors::FusedDeviceTensors(TensorGroup group) : group_(std::move(group)) {
  for (const at::Tensor& step : group_.steps()) {
    if (step.device() == group_.device() && step.scalar_type() == at::kFloat) continue;
    throw NotFusable(absl::StrCat("thalweg: a number of steps is ",
                                  c10::toString(step.scalar_type()), " on ", step.device().str(),
                                  ", expected Float on ", group_.device().str()));
  }
}

FusedDeviceTensors::Batch FusedDeviceTensors::Prepare() {
  TensorGroup::Work work = group_.Gather();
  std::vector<DeviceTensor> tensors(work.tensors.size());
  for (size_t j = 0; j < tensors.size(); ++j) {
    static_cast<OptimTensor&>(tensors[j]) = work.tensors[j];
    if (group_.steps().empty()) continue;
    tensors[j].step = group_.steps()[work.which[j]].mutable_data_ptr<float>();
  }
  absl::StatusOr<OptimPlan> plan = OptimPlan::Make(tensors);
  if (!plan.ok()) throw NotFusable(absl::StrCat("thalweg: ", plan.status().message()));
  const auto wanted = static_cast<int64_t>(plan->workspace_bytes());
  if (!workspace_.defined() || workspace_.numel() < wanted) {
    workspace_ = Memory(plan->workspace_bytes(), group_.device());
  }
  const std::byte* const table = table_.Send(plan->table(), group_.device());
  const std::span<std::byte> workspace(FirstByteOf(workspace_), workspace_.nbytes());
  return {std::move(work), *std::move(plan), {table, workspace}};
}

template <class Settings>
size_t FusedDeviceTensors::Run(Step<Settings> step, Settings settings, const DeviceInputs& inputs) {
  if (settings.max_grad_norm > 0 && !inputs.grad_squares.has_value()) {
    throw std::invalid_argument("thalweg: max_grad_norm is set, expected grad_squares as well");
  }
  c10::NoGradGuard no_grad;
  const c10::DeviceGuard guard(group_.device());
  const Batch batch = Prepare();
  if (batch.work.tensors.empty()) return 0;
  Numbers numbers(group_.device());
  StepInputs read;
  if (inputs.lr.has_value()) settings.lr_at = numbers.Float(inputs.lr, "lr");
  if (inputs.grad_scale.has_value()) {
    read.grad_scale = numbers.Float(inputs.grad_scale, "grad_scale");
  }
  if (inputs.found_inf.has_value()) read.found_inf = numbers.Float(inputs.found_inf, "found_inf");
  if (inputs.grad_squares.has_value()) {
    read.grad_squares = numbers.Double(inputs.grad_squares, "grad_squares");
  }
  const std::byte* const sent =
      settings_.Send(std::as_bytes(std::span(&settings, 1)), group_.device());
  ThrowIfFailed(step(CurrentStream(group_.device()), batch.plan, batch.memory,
                     reinterpret_cast<const Settings*>(sent), read));
  group_.Finish(batch.work);
  return batch.work.tensors.size();
}

size_t FusedDeviceTensors::Adam(const AdamSettings& settings, const DeviceInputs& inputs) {
  return Run(&StepAdamOnDevice, settings, inputs);
}

size_t FusedDeviceTensors::Sgd(const SgdSettings& settings, const DeviceInputs& inputs) {
  return Run(&StepSgdOnDevice, settings, inputs);
}

size_t FusedDeviceTensors::Lamb(const LambSettings& settings, const DeviceInputs& inputs) {
  return Run(&StepLambOnDevice, settings, inputs);
}

at::Tensor FusedDeviceTensors::GradSquares() {
  c10::NoGradGuard no_grad;
  const c10::DeviceGuard guard(group_.device());
  const Batch batch = Prepare();
  const at::Tensor squares = at::zeros({}, at::TensorOptions(group_.device()).dtype(at::kDouble));
  if (batch.work.tensors.empty()) return squares;
  ThrowIfFailed(GradSquaresOnDevice(CurrentStream(group_.device()), batch.plan, batch.memory,
                                    squares.mutable_data_ptr<double>(), nullptr));
  return squares;
}

}  // namespace thalweg
