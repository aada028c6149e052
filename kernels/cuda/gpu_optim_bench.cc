// These benchmarks compare steps of the optimizers with a copy (bench_device.h). The bytes of a
// case are those of each array that a phase reads, and of each that it writes.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/dtype.h"
#include "core/base/status_macros.h"
#include "kernels/cuda/bench_device.h"
#include "kernels/optim/optim_cuda.h"

namespace thalweg {
namespace {

struct Types {
  const char* name;
  DType param;
  DType grad;
  std::optional<DType> copy;
};

constexpr Types kFp32 = {"fp32", DType::kFloat32, DType::kFloat32, std::nullopt};
constexpr Types kBf16 = {"bf16", DType::kBFloat16, DType::kBFloat16, std::nullopt};
constexpr Types kO2 = {"O2 fp16", DType::kFloat32, DType::kFloat16, DType::kFloat16};

// The cases are: arrays of 256 MiB in float32, several times as much as a GPU's cache; the
// parameters of a small model; and tensors whose step is all overhead.
const std::vector<uint64_t> kOneLarge = {uint64_t{64} << 20};
const std::vector<uint64_t> kLayers(400, 64'000);
const std::vector<uint64_t> kSmall(1000, 1000);

// A Model has contiguous tensors, each at a multiple of 256 elements.
class Model {
 public:
  Model(const std::vector<uint64_t>& sizes, const Types& types, size_t states)
      : params_(Padded(sizes) * SizeOf(types.param)),
        grads_(Padded(sizes) * SizeOf(types.grad)),
        copies_(types.copy.has_value() ? Padded(sizes) * SizeOf(*types.copy) : 1),
        steps_(sizes.size()) {
    for (size_t k = 0; k < states; ++k) states_.emplace_back(Padded(sizes));
    std::vector<DeviceTensor> tensors;
    uint64_t at = 0;
    for (const uint64_t elems : sizes) {
      tensors.push_back(TensorAt(at, elems, types));
      tensors.back().step = steps_.get() + (tensors.size() - 1);
      at += PaddedSize(elems);
      elems_ += elems;
    }
    step_bytes_ = StepBytes(tensors[0]) * elems_;
    absl::StatusOr<OptimPlan> plan = OptimPlan::Make(tensors);
    Require(plan.status());
    plan_.emplace(*std::move(plan));
    table_.emplace(plan_->table());
    workspace_.emplace(plan_->workspace_bytes());
  }

  const OptimPlan& plan() const { return *plan_; }
  OptimMemory memory() const { return {table_->get(), {workspace_->get(), workspace_->bytes()}}; }
  uint64_t elems() const { return elems_; }
  uint64_t step_bytes() const { return step_bytes_; }

 private:
  static uint64_t PaddedSize(uint64_t elems) { return (elems + 255) / 256 * 256; }
  static uint64_t Padded(const std::vector<uint64_t>& sizes) {
    uint64_t elems = 0;
    for (const uint64_t size : sizes) elems += PaddedSize(size);
    return elems;
  }

  DeviceTensor TensorAt(uint64_t at, uint64_t elems, const Types& types) const {
    DeviceTensor tensor;
    tensor.param = params_.get() + at * SizeOf(types.param);
    tensor.grad = grads_.get() + at * SizeOf(types.grad);
    for (size_t k = 0; k < states_.size(); ++k) tensor.states[k] = states_[k].get() + at;
    tensor.elems = elems;
    tensor.param_type = types.param;
    tensor.grad_type = types.grad;
    if (types.copy.has_value()) {
      tensor.copy = copies_.get() + at * SizeOf(*types.copy);
      tensor.copy_type = *types.copy;
    }
    return tensor;
  }

  const DeviceArray<std::byte> params_;
  const DeviceArray<std::byte> grads_;
  const DeviceArray<std::byte> copies_;
  const DeviceArray<float> steps_;
  std::vector<DeviceArray<float>> states_;
  std::optional<OptimPlan> plan_;
  std::optional<DeviceArray<std::byte>> table_;
  std::optional<DeviceArray<std::byte>> workspace_;
  uint64_t elems_ = 0;
  uint64_t step_bytes_ = 0;
};

// Inputs are the other data that a step reads.
template <class Settings>
struct Inputs {
  explicit Inputs(const Settings& s)
      : settings(std::span<const Settings>(&s, 1)), found_inf(1), squares(1) {}

  StepInputs Step() const { return {nullptr, found_inf.get(), squares.get()}; }

  const DeviceArray<Settings> settings;
  const DeviceArray<float> found_inf;
  const DeviceArray<double> squares;
};

template <class Settings>
Settings MomentSettings() {
  Settings settings;
  settings.lr = 1e-3;
  settings.beta1 = 0.9;
  settings.beta2 = 0.999;
  settings.epsilon = 1e-8;
  settings.weight_decay = 0.01;
  settings.decoupled = true;
  return settings;
}

void BenchAdam(Bench& bench, const std::string& name, const std::vector<uint64_t>& sizes,
               const Types& types) {
  const Model model(sizes, types, 2);
  const Inputs<AdamSettings> inputs(MomentSettings<AdamSettings>());
  bench.Run("adamw " + std::string(types.name) + name, model.step_bytes(), [&](CudaStream stream) {
    return StepAdamOnDevice(stream, model.plan(), model.memory(), inputs.settings.get(),
                            inputs.Step());
  });
}

void BenchSgd(Bench& bench, const Types& types, size_t states) {
  const Model model(kOneLarge, types, states);
  SgdSettings settings;
  settings.lr = 0.1;
  settings.momentum = 0.9;
  const Inputs<SgdSettings> inputs(settings);
  const std::string name = states == 0 ? "sgd " : "sgd with momentum ";
  bench.Run(name + types.name, model.step_bytes(), [&](CudaStream stream) {
    return StepSgdOnDevice(stream, model.plan(), model.memory(), inputs.settings.get(),
                           inputs.Step());
  });
}

void BenchLamb(Bench& bench, const std::string& name, const std::vector<uint64_t>& sizes,
               const Types& types) {
  const Model model(sizes, types, 2);
  LambSettings settings = MomentSettings<LambSettings>();
  settings.max_grad_norm = 1;
  const Inputs<LambSettings> inputs(settings);
  const uint64_t grad_bytes = model.elems() * SizeOf(types.grad);
  const auto squares = [&](CudaStream stream) {
    return GradSquaresOnDevice(stream, model.plan(), model.memory(), inputs.squares.get(),
                               inputs.found_inf.get());
  };
  bench.Run("norm " + std::string(types.name) + name, grad_bytes, squares);
  // The second phase reads parameters and both moments again.
  const uint64_t again = model.elems() * (SizeOf(types.param) + 2 * sizeof(float));
  bench.Run("lamb " + std::string(types.name) + name, grad_bytes + model.step_bytes() + again,
            [&](CudaStream stream) {
              THALWEG_RETURN_IF_ERROR(squares(stream));
              return StepLambOnDevice(stream, model.plan(), model.memory(), inputs.settings.get(),
                                      inputs.Step());
            });
}

void RunAll(int argc, char** argv) {
  Bench bench(argc, argv);
  for (size_t states : {0, 1}) {
    BenchSgd(bench, kFp32, states);
    BenchSgd(bench, kO2, states);
  }
  for (const Types& types : {kFp32, kBf16, kO2}) {
    BenchAdam(bench, "", kOneLarge, types);
    BenchLamb(bench, "", kOneLarge, types);
  }
  BenchAdam(bench, ", 400 tensors of 64000", kLayers, kFp32);
  BenchLamb(bench, ", 400 tensors of 64000", kLayers, kFp32);
  BenchAdam(bench, ", 1000 tensors of 1000", kSmall, kFp32);
  BenchLamb(bench, ", 1000 tensors of 1000", kSmall, kFp32);
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) { thalweg::RunAll(argc, argv); }
