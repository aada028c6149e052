#include "kernels/optim/optim_cuda.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/launch/count_launches.h"
#include "kernels/optim/optim_cuda_test_util.h"

namespace thalweg::optim_cuda_test {
namespace {

using ::testing::HasSubstr;

constexpr float kScale = 1024;

// Twins are the tensors of an optimizer, updated in both memories.
class Twins {
 public:
  Twins(std::span<const TensorKind> kinds, size_t states) : random_(kinds.size()) {
    for (const TensorKind& kind : kinds) tensors_.emplace_back(kind, states, random_);
    Plan();
  }

  void Plan() {
    std::vector<DeviceTensor> tensors;
    for (TwinTensor& tensor : tensors_) tensors.push_back(tensor.OnDevice());
    plan_.emplace(OptimPlan::Make(tensors).value());
    table_.emplace(std::vector<std::byte>(plan_->table().begin(), plan_->table().end()));
    workspace_.emplace(std::vector<std::byte>(plan_->workspace_bytes() + kGuard, kUntouched));
  }

  void NewGrads() {
    for (TwinTensor& tensor : tensors_) tensor.NewGrad(random_);
  }

  const OptimPlan& plan() const { return *plan_; }
  OptimMemory memory() const {
    return {table_->Data(), workspace_->Span().first(plan_->workspace_bytes())};
  }
  std::vector<TwinTensor>& tensors() { return tensors_; }
  StepInputs inputs() const {
    return {scale_.As<float>(), found_inf_.As<float>(), squares_.As<double>()};
  }
  absl::Status FindSquares(CudaStream stream = nullptr) const {
    return GradSquaresOnDevice(stream, plan(), memory(), squares_.As<double>(),
                               found_inf_.As<float>());
  }

  void ExpectEqual() const {
    ASSERT_TRUE(FinishDevice().ok());
    const std::vector<std::byte> workspace = workspace_->Content();
    ASSERT_EQ(std::count(workspace.end() - kGuard, workspace.end(), kUntouched), kGuard)
        << "the step has written behind its workspace";
    for (size_t i = 0; i < tensors_.size(); ++i) {
      ASSERT_TRUE(tensors_[i].IsEqual())
          << "tensor " << i << " of " << tensors_[i].kind().elems << " elements";
    }
  }

 private:
  static constexpr int kGuard = 64;  // bytes behind the workspace
  static constexpr std::byte kUntouched{0xa5};

  std::mt19937_64 random_;
  std::vector<TwinTensor> tensors_;
  std::optional<OptimPlan> plan_;
  std::optional<DeviceBuffer> table_;
  std::optional<DeviceBuffer> workspace_;
  const DeviceBuffer scale_{std::vector<float>{kScale}};
  const DeviceBuffer found_inf_{std::vector<float>{0}};
  const DeviceBuffer squares_{std::vector<double>{0}};
};

template <class Tensor, class Factors, class Settings>
std::vector<Tensor> OnHost(Twins& twins, const std::vector<Settings>& settings,
                           const Factors& factors, FlatIndex* index) {
  std::vector<Tensor> tensors;
  for (TwinTensor& twin : twins.tensors()) {
    Tensor tensor;
    static_cast<OptimTensor&>(tensor) = twin.OnHost();
    twin.HostStep() += 1;
    tensor.factors = factors(settings[twin.kind().group], twin.HostStep());
    index->Add(tensor.elems, StepBytes(tensor));
    tensors.push_back(tensor);
  }
  return tensors;
}

// Returns torch's formulas in float64.
AdamFactors AdamFactorsAt(const AdamSettings& s, double step) {
  const double root = std::sqrt(1 - std::pow(s.beta2, step));
  return {.grad = static_cast<float>((s.maximize ? -1.0 : 1.0) / kScale),
          .decay = s.decoupled ? static_cast<float>(1 - s.lr * s.weight_decay) : 1.0f,
          .l2 = s.decoupled ? 0.0f : static_cast<float>(s.weight_decay),
          .first = static_cast<float>(1 - s.beta1),
          .second_keep = static_cast<float>(s.beta2),
          .second = static_cast<float>(1 - s.beta2),
          .epsilon = static_cast<float>(s.epsilon * root),
          .step = static_cast<float>(s.lr * root / (1 - std::pow(s.beta1, step)))};
}

double SumOf(const std::vector<double>& sums, size_t first, size_t count) {
  double total = 0;
  for (size_t g = first; g < first + count; ++g) total += sums[g];
  return total;
}

// Returns the sum over all gradients, which have fewer granules than a total has parts.
double SquaresOnHost(Twins& twins) {
  std::vector<OptimTensor> grads;
  FlatIndex index;
  for (TwinTensor& twin : twins.tensors()) {
    grads.push_back(twin.OnHost());
    index.Add(grads.back().elems, StepBytes(grads.back()));
  }
  std::vector<double> sums(index.Granules());
  RunGradSquares(grads, index, 0, index.Size(), sums.data());
  return SumOf(sums, 0, sums.size());
}

class OptimCudaTest : public DeviceTest {};

std::vector<AdamSettings> SomeAdamSettings() {
  AdamSettings coupled;
  coupled.lr = 0.01;
  coupled.weight_decay = 0.1;
  coupled.maximize = true;
  coupled.beta1 = 0.9;
  coupled.beta2 = 0.999;
  coupled.epsilon = 1e-8;
  AdamSettings decoupled = coupled;
  decoupled.maximize = false;
  decoupled.decoupled = true;
  decoupled.beta1 = 0.4;  // makes the mean of moments start from the other end
  return {coupled, decoupled};
}

TEST_F(OptimCudaTest, AdamEqualsTheCpuForAllTypesSizesAndAddresses) {
  for (const size_t states : {2, 3}) {
    Twins twins(AllKinds(), states);
    std::vector<AdamSettings> settings = SomeAdamSettings();
    for (int step = 0; step < 3; ++step) {
      settings[0].lr *= 0.7;
      const DeviceBuffer on_device(settings);
      ASSERT_TRUE(StepAdamOnDevice(nullptr, twins.plan(), twins.memory(),
                                   on_device.As<AdamSettings>(), twins.inputs())
                      .ok());
      FlatIndex index;
      const auto tensors = OnHost<AdamTensor>(twins, settings, &AdamFactorsAt, &index);
      RunAdam(tensors, index, 0, index.Size());
      twins.ExpectEqual();
      twins.NewGrads();
    }
  }
}

TEST_F(OptimCudaTest, AdamClipsByTheNormThatLiesOnTheDevice) {
  Twins twins(AllKinds(), 2);
  std::vector<AdamSettings> settings = SomeAdamSettings();
  settings[0].max_grad_norm = 1e-3;
  settings[0].norm_epsilon = 1e-6;
  ASSERT_TRUE(twins.FindSquares().ok());
  const DeviceBuffer on_device(settings);
  ASSERT_TRUE(StepAdamOnDevice(nullptr, twins.plan(), twins.memory(), on_device.As<AdamSettings>(),
                               twins.inputs())
                  .ok());
  const double share = 1e-3 / (std::sqrt(SquaresOnHost(twins)) / kScale + 1e-6);
  ASSERT_LT(share, 0.5);
  FlatIndex index;
  const auto tensors = OnHost<AdamTensor>(
      twins, settings,
      [share](const AdamSettings& s, double step) {
        AdamFactors factors = AdamFactorsAt(s, step);
        if (s.max_grad_norm > 0) factors.grad = static_cast<float>(-1.0 / kScale * share);
        return factors;
      },
      &index);
  RunAdam(tensors, index, 0, index.Size());
  twins.ExpectEqual();
}

TEST_F(OptimCudaTest, LearningRateInDeviceMemoryIsReadThere) {
  Twins twins(std::vector<TensorKind>(2, {.elems = 100}), 2);
  std::vector<AdamSettings> settings = SomeAdamSettings();
  const DeviceBuffer rate(std::vector<float>{0.25f});
  std::vector<AdamSettings> pointing = settings;
  for (AdamSettings& s : pointing) s.lr_at = rate.As<float>();
  for (AdamSettings& s : settings) s.lr = 0.25;
  const DeviceBuffer on_device(pointing);
  ASSERT_TRUE(StepAdamOnDevice(nullptr, twins.plan(), twins.memory(), on_device.As<AdamSettings>(),
                               twins.inputs())
                  .ok());
  FlatIndex index;
  const auto tensors = OnHost<AdamTensor>(twins, settings, &AdamFactorsAt, &index);
  RunAdam(tensors, index, 0, index.Size());
  twins.ExpectEqual();
}

TEST_F(OptimCudaTest, SgdEqualsTheCpuAndStartsFromTheFirstGradient) {
  SgdSettings plain;
  plain.lr = 0.1;
  plain.weight_decay = 0.01;
  plain.momentum = 0.9;
  plain.dampening = 0.25;
  SgdSettings nesterov = plain;
  nesterov.weight_decay = 0;
  nesterov.dampening = 0;
  nesterov.nesterov = true;
  nesterov.maximize = true;
  const std::vector<SgdSettings> settings = {plain, nesterov};
  const auto factors = [](const SgdSettings& s, double step) {
    return SgdFactors{.grad = static_cast<float>((s.maximize ? -1.0 : 1.0) / kScale),
                      .l2 = static_cast<float>(s.weight_decay),
                      .keep = step == 1 ? 0.0f : static_cast<float>(s.momentum),
                      .take = step == 1 ? 1.0f : static_cast<float>(1 - s.dampening),
                      .momentum = static_cast<float>(s.momentum),
                      .lr = static_cast<float>(s.lr),
                      .nesterov = s.nesterov};
  };
  const DeviceBuffer on_device(settings);
  for (const size_t states : {0, 1}) {
    Twins twins(AllKinds(), states);
    for (int step = 0; step < 2; ++step) {
      ASSERT_TRUE(StepSgdOnDevice(nullptr, twins.plan(), twins.memory(),
                                  on_device.As<SgdSettings>(), twins.inputs())
                      .ok());
      FlatIndex index;
      const auto tensors = OnHost<SgdTensor>(twins, settings, factors, &index);
      RunSgd(tensors, index, 0, index.Size());
      twins.ExpectEqual();
      twins.NewGrads();
    }
  }
}

TEST_F(OptimCudaTest, SgdWhoseStepsAreNotCountedKeepsItsMomentumFromTheStart) {
  SgdSettings settings;
  settings.lr = 1;
  settings.momentum = 0.5;
  const DeviceBuffer on_device(std::vector<SgdSettings>{settings});
  const DeviceBuffer param(std::vector<float>{4});
  const DeviceBuffer grad(std::vector<float>{1});
  const DeviceBuffer momentum(std::vector<float>{2});
  DeviceTensor tensor;
  tensor.param = param.Data();
  tensor.grad = grad.Data();
  tensor.states[0] = momentum.As<float>();
  tensor.elems = 1;
  const OptimPlan plan = OptimPlan::Make({&tensor, 1}).value();
  const DeviceBuffer table(std::vector<std::byte>(plan.table().begin(), plan.table().end()));
  const DeviceBuffer workspace(plan.workspace_bytes());
  ASSERT_TRUE(StepSgdOnDevice(nullptr, plan, {table.Data(), workspace.Span()},
                              on_device.As<SgdSettings>(), {})
                  .ok());
  ASSERT_TRUE(FinishDevice().ok());
  EXPECT_EQ(momentum.ContentAs<float>()[0], 2);  // half of 2, and 1
  EXPECT_EQ(param.ContentAs<float>()[0], 2);
}

// All tensors have fewer granules than a total has parts, so these are added in their own order.
void LambOnHost(Twins& twins, const std::vector<LambSettings>& settings) {
  const double norm = std::sqrt(SquaresOnHost(twins)) / kScale;
  const auto factors = [norm](const LambSettings& s, double step) {
    const double clip =
        s.max_grad_norm > 0 && norm > s.max_grad_norm ? s.max_grad_norm / norm : 1.0;
    const auto decay = static_cast<float>(s.weight_decay);
    const double first = s.bias_correction ? 1 - std::pow(s.beta1, step) : 1;
    const double root = s.bias_correction ? std::sqrt(1 - std::pow(s.beta2, step)) : 1;
    return LambFactors{.grad = static_cast<float>(1.0 / kScale * clip),
                       .l2 = s.decoupled ? 0.0f : decay,
                       .decay = s.decoupled ? decay : 0.0f,
                       .first_keep = static_cast<float>(s.beta1),
                       .first = s.grad_averaging ? static_cast<float>(1 - s.beta1) : 1.0f,
                       .second_keep = static_cast<float>(s.beta2),
                       .second = static_cast<float>(1 - s.beta2),
                       .correction = static_cast<float>(root / first),
                       .epsilon = static_cast<float>(s.epsilon * root)};
  };
  FlatIndex index;
  auto tensors = OnHost<LambTensor>(twins, settings, factors, &index);
  std::vector<double> params(index.Granules());
  std::vector<double> updates(index.Granules());
  RunLambMoments(tensors, index, 0, index.Size(), params.data(), updates.data());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const LambSettings& s = settings[twins.tensors()[i].kind().group];
    const size_t granules = FlatIndex::GranulesOf(tensors[i].elems);
    const double param = SumOf(params, index.FirstGranule(i), granules);
    const double update = SumOf(updates, index.FirstGranule(i), granules);
    tensors[i].rate = static_cast<float>(s.lr);
    if (!s.trust_ratio || param == 0 || update == 0) continue;
    tensors[i].rate = static_cast<float>(tensors[i].rate * std::sqrt(param / update));
  }
  RunLambStep(tensors, index, 0, index.Size());
}

std::vector<LambSettings> SomeLambSettings() {
  LambSettings usual;
  usual.lr = 0.01;
  usual.weight_decay = 0.1;
  usual.beta1 = 0.9;
  usual.beta2 = 0.999;
  usual.epsilon = 1e-6;
  usual.decoupled = true;
  LambSettings other = usual;
  other.decoupled = false;
  other.grad_averaging = false;
  other.bias_correction = false;
  return {usual, other};
}

TEST_F(OptimCudaTest, LambEqualsTheCpuWithAndWithoutClippingAndTrust) {
  for (const bool trust_ratio : {true, false}) {
    Twins twins(AllKinds(), 2);
    std::vector<LambSettings> settings = SomeLambSettings();
    settings[1].trust_ratio = trust_ratio;
    for (const double bound : {0.0, 1e-3, 1e6}) {
      settings[0].max_grad_norm = bound;
      const DeviceBuffer on_device(settings);
      ASSERT_TRUE(twins.FindSquares().ok());
      ASSERT_TRUE(StepLambOnDevice(nullptr, twins.plan(), twins.memory(),
                                   on_device.As<LambSettings>(), twins.inputs())
                      .ok());
      LambOnHost(twins, settings);
      twins.ExpectEqual();
      twins.NewGrads();
    }
  }
}

TEST_F(OptimCudaTest, ManySmallTensorsEqualTheCpuAndSoDoesOne) {
  const std::vector<LambSettings> settings = SomeLambSettings();
  const DeviceBuffer on_device(settings);
  for (const size_t count : {400, 1}) {
    std::vector<TensorKind> kinds(count);
    for (size_t i = 0; i < count; ++i) {
      kinds[i] = {.elems = (i + 5) % 37, .param = DType::kBFloat16, .grad = DType::kBFloat16};
    }
    Twins twins(kinds, 2);
    ASSERT_TRUE(StepLambOnDevice(nullptr, twins.plan(), twins.memory(),
                                 on_device.As<LambSettings>(), twins.inputs())
                    .ok());
    LambOnHost(twins, settings);
    twins.ExpectEqual();
  }
}

TEST_F(OptimCudaTest, InfiniteGradientSkipsTheStepAndIsNotCounted) {
  Twins twins(AllKinds(), 2);
  const std::vector<LambSettings> lamb = SomeLambSettings();
  const std::vector<AdamSettings> adam = SomeAdamSettings();
  const std::vector<SgdSettings> sgd(2);
  const DeviceBuffer on_device(lamb);
  const DeviceBuffer adam_on_device(adam);
  const DeviceBuffer sgd_on_device(sgd);
  TwinArray& grad = twins.tensors().back().grad();
  const std::vector<std::byte> finite = grad.HostContent();
  std::vector<std::byte> infinite = finite;
  const TensorKind& kind = twins.tensors().back().kind();
  ASSERT_EQ(kind.grad, DType::kFloat32);
  StoreBits<Fp32>(Fp32::kInfinity, infinite.data(), kind.elems - 1);
  grad.Fill(infinite);
  ASSERT_TRUE(twins.FindSquares().ok());
  const StepInputs in = twins.inputs();
  ASSERT_TRUE(
      StepLambOnDevice(nullptr, twins.plan(), twins.memory(), on_device.As<LambSettings>(), in)
          .ok());
  ASSERT_TRUE(
      StepAdamOnDevice(nullptr, twins.plan(), twins.memory(), adam_on_device.As<AdamSettings>(), in)
          .ok());
  ASSERT_TRUE(
      StepSgdOnDevice(nullptr, twins.plan(), twins.memory(), sgd_on_device.As<SgdSettings>(), in)
          .ok());
  twins.ExpectEqual();
  grad.Fill(finite);
  ASSERT_TRUE(twins.FindSquares().ok());
  ASSERT_TRUE(
      StepLambOnDevice(nullptr, twins.plan(), twins.memory(), on_device.As<LambSettings>(), in)
          .ok());
  LambOnHost(twins, lamb);
  twins.ExpectEqual();
}

TEST_F(OptimCudaTest, StepsTakeAsManyLaunchesAsTheHeaderSays) {
  Twins twins(AllKinds(), 2);
  const DeviceBuffer adam(SomeAdamSettings());
  const DeviceBuffer lamb(SomeLambSettings());
  const auto launches = [](const auto& work) { return CountLaunches(work).value(); };
  EXPECT_EQ(launches([&](CudaStream stream) { return twins.FindSquares(stream); }), 2u);
  EXPECT_EQ(launches([&](CudaStream stream) {
              return StepAdamOnDevice(stream, twins.plan(), twins.memory(), adam.As<AdamSettings>(),
                                      twins.inputs());
            }),
            2u);
  EXPECT_EQ(launches([&](CudaStream stream) {
              return StepLambOnDevice(stream, twins.plan(), twins.memory(), lamb.As<LambSettings>(),
                                      twins.inputs());
            }),
            4u);
}

TEST_F(OptimCudaTest, PlanWithoutWhatTheOptimizerKeepsIsRefused) {
  const Twins twins(std::vector<TensorKind>(1, {.elems = 5}), 1);
  const absl::Status status =
      StepAdamOnDevice(nullptr, twins.plan(), twins.memory(), nullptr, twins.inputs());
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("got 1 states"));
  const auto refusal = [&](std::span<std::byte> workspace) {
    const OptimMemory memory = {twins.memory().table, workspace};
    const absl::Status refused =
        StepSgdOnDevice(nullptr, twins.plan(), memory, nullptr, twins.inputs());
    EXPECT_TRUE(absl::IsInvalidArgument(refused));
    return std::string(refused.message());
  };
  const std::span<std::byte> workspace = twins.memory().workspace;
  EXPECT_THAT(refusal(workspace.subspan(8)), HasSubstr("got one 8 bytes behind"));
  EXPECT_THAT(refusal(workspace.first(workspace.size() - 1)), HasSubstr("expected a workspace of"));
}

}  // namespace
}  // namespace thalweg::optim_cuda_test
