#include "client/torch/fused_tensors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

// Bytes below which another thread costs more than it does.
constexpr int64_t kGrainBytes = 128 << 10;

DType TypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

void Check(const at::Tensor& tensor, const char* what) {
  const auto refuse = [&](const std::string& got, const char* expected) {
    throw NotFusable(absl::StrCat("thalweg: a ", what, " of ", tensor.dim(), " dimensions is ", got,
                                  ", expected ", expected, ": use torch's own optimizer for it"));
  };
  if (tensor.layout() != at::kStrided) refuse("sparse", "a dense one");
  if (!tensor.is_cpu()) refuse(absl::StrCat("on ", tensor.device().str()), "one on the CPU");
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) refuse("a subclass", "a plain tensor");
  const at::ScalarType type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) {
    refuse(c10::toString(type), "Float, Half or BFloat16");
  }
}

// Whether element for element lies where that of `like` does.
bool LiesAs(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.is_non_overlapping_and_dense() && tensor.strides() == like.strides();
}

at::Tensor CopyAs(const at::Tensor& tensor, const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor);
}

template <class Body>
void InParallel(const FlatIndex& index, const Body& body) {
  at::parallel_for(0, static_cast<int64_t>(index.Size()), kGrainBytes,
                   [&](int64_t begin, int64_t end) {
                     body(static_cast<uint64_t>(begin), static_cast<uint64_t>(end));
                   });
}

// As torch makes them; through torch, reading one takes as long as a thousand elements.
bool IsPlainStep(const at::Tensor& step) {
  return step.is_cpu() && step.scalar_type() == at::kFloat;
}

// Autograd refuses a backward pass through values that have changed since.
void BumpVersion(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Powers of β by step: parameters mostly have done equally many.
class BiasCorrections {
 public:
  explicit BiasCorrections(const AdamOptions& options) : options_(options) {}

  void MoveTo(double step) {
    if (!options_.bias_correction || step == step_) return;
    step_ = step;
    first = 1 - std::pow(options_.beta1, step);
    second_root = std::sqrt(1 - std::pow(options_.beta2, step));
  }

  double first = 1;
  double second_root = 1;

 private:
  const AdamOptions& options_;
  double step_ = 0;
};

AdamFactors FactorsOf(const AdamOptions& o, const BiasCorrections& corrections, double grad) {
  return {.grad = static_cast<float>(grad),
          .decay = o.decoupled ? static_cast<float>(1 - o.lr * o.weight_decay) : 1.0f,
          .l2 = o.decoupled ? 0.0f : static_cast<float>(o.weight_decay),
          .first = static_cast<float>(1 - o.beta1),
          .second_keep = static_cast<float>(o.beta2),
          .second = static_cast<float>(1 - o.beta2),
          .epsilon = static_cast<float>(o.epsilon * corrections.second_root),
          .step = static_cast<float>(o.lr * corrections.second_root / corrections.first)};
}

LambFactors FactorsOf(const LambOptions& o, const BiasCorrections& corrections, double grad) {
  const AdamOptions& a = o.adam;
  return {.grad = static_cast<float>(grad),
          .l2 = a.decoupled ? 0.0f : static_cast<float>(a.weight_decay),
          .decay = a.decoupled ? static_cast<float>(a.weight_decay) : 0.0f,
          .first_keep = static_cast<float>(a.beta1),
          .first = o.grad_averaging ? static_cast<float>(1 - a.beta1) : 1.0f,
          .second_keep = static_cast<float>(a.beta2),
          .second = static_cast<float>(1 - a.beta2),
          .correction = static_cast<float>(corrections.second_root / corrections.first),
          .epsilon = static_cast<float>(a.epsilon * corrections.second_root)};
}

// Sets each rate to lr·‖param‖/‖update‖, to lr where one of the norms is 0.
void ApplyTrustRatios(const FlatIndex& index, std::span<const double> param_squares,
                      std::span<const double> update_squares, std::vector<LambTensor>& tensors) {
  for (size_t j = 0; j < tensors.size(); ++j) {
    double param = 0;
    double update = 0;
    const uint64_t first = index.FirstGranule(j);
    for (uint64_t g = first; g < first + FlatIndex::GranulesOf(tensors[j].elems); ++g) {
      param += param_squares[g];
      update += update_squares[g];
    }
    if (param == 0 || update == 0) continue;
    tensors[j].rate = static_cast<float>(tensors[j].rate * std::sqrt(param / update));
  }
}

}  // namespace

void CheckFusable(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    Check(param, "parameter");
    if (param.grad().defined()) Check(param.grad(), "gradient");
  }
}

FusedTensors::FusedTensors(std::vector<at::Tensor> params,
                           std::vector<std::vector<at::Tensor>> states,
                           std::vector<at::Tensor> steps,
                           std::vector<std::optional<at::Tensor>> copies)
    : params_(std::move(params)),
      states_(std::move(states)),
      steps_(std::move(steps)),
      copies_(std::move(copies)) {
  for (const at::Tensor& param : params_) Check(param, "parameter");
  for (const auto& copy : copies_) {
    if (copy.has_value()) Check(*copy, "copy");
  }
  for (const auto& state : states_) {
    for (size_t i = 0; i < state.size(); ++i) {
      Check(state[i], "state");
      if (state[i].scalar_type() != at::kFloat || state[i].sizes() != params_[i].sizes()) {
        throw NotFusable(absl::StrCat(
            "thalweg: the state of a parameter is ", c10::toString(state[i].scalar_type()), " of ",
            state[i].numel(), " elements, expected Float of ", params_[i].numel()));
      }
    }
  }
}

void FusedTensors::CheckGrads() const {
  for (const at::Tensor& param : params_) {
    if (param.grad().defined()) Check(param.grad(), "gradient");
  }
}

at::Tensor FusedTensors::Grad(size_t i) const {
  at::Tensor grad = params_[i].grad();
  if (!grad.defined()) return grad;
  Check(grad, "gradient");
  return grad.is_neg() ? grad.resolve_neg() : grad;
}

template <class Tensor>
FusedTensors::Work<Tensor> FusedTensors::Gather() const {
  Work<Tensor> work;
  const auto lay = [&work](const at::Tensor& tensor, const at::Tensor& like, bool back) {
    if (LiesAs(tensor, like)) return tensor;
    at::Tensor laid = CopyAs(tensor, like);
    work.keep_alive.push_back(laid);
    if (back) work.moved.push_back({tensor, laid});
    return laid;
  };
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor grad = Grad(i);
    if (!grad.defined()) continue;
    const at::Tensor& original = params_[i];
    const bool dense = original.is_non_overlapping_and_dense();
    const at::Tensor param = dense ? original : original.contiguous();
    if (!dense) work.moved.push_back({original, param});
    const at::Tensor laid_grad = lay(grad, param, /*back=*/false);
    work.keep_alive.push_back(laid_grad);
    Tensor tensor;
    tensor.param = param.mutable_data_ptr();
    tensor.grad = laid_grad.const_data_ptr();
    for (size_t k = 0; k < states_.size(); ++k) {
      tensor.states[k] =
          static_cast<float*>(lay(states_[k][i], param, /*back=*/true).mutable_data_ptr());
    }
    if (!copies_.empty() && copies_[i].has_value()) {
      tensor.copy = lay(*copies_[i], param, /*back=*/true).mutable_data_ptr();
      tensor.copy_type = TypeOf(*copies_[i]);
    }
    tensor.elems = static_cast<uint64_t>(param.numel());
    tensor.param_type = TypeOf(param);
    tensor.grad_type = TypeOf(laid_grad);
    work.index.Add(tensor.elems, StepBytes(tensor));
    work.tensors.push_back(tensor);
    work.which.push_back(i);
  }
  return work;
}

template <class Tensor>
void FusedTensors::Finish(const Work<Tensor>& work) const {
  for (const Moved& moved : work.moved) moved.original.copy_(moved.laid);
  for (const size_t i : work.which) {
    BumpVersion(params_[i]);
    if (!copies_.empty() && copies_[i].has_value()) BumpVersion(*copies_[i]);
    if (steps_.empty()) continue;
    if (IsPlainStep(steps_[i])) {
      *steps_[i].mutable_data_ptr<float>() = static_cast<float>(NextStep(i));
    } else {
      steps_[i].fill_(NextStep(i));
    }
  }
}

double FusedTensors::NextStep(size_t i) const {
  return IsPlainStep(steps_[i]) ? *steps_[i].const_data_ptr<float>() + 1.0
                                : steps_[i].item<double>() + 1;
}

size_t FusedTensors::Adam(const AdamOptions& options, double grad_factor) {
  c10::NoGradGuard no_grad;
  auto work = Gather<AdamTensor>();
  BiasCorrections corrections(options);
  for (size_t j = 0; j < work.tensors.size(); ++j) {
    corrections.MoveTo(NextStep(work.which[j]));
    work.tensors[j].factors = FactorsOf(options, corrections, grad_factor);
  }
  InParallel(work.index,
             [&](uint64_t begin, uint64_t end) { RunAdam(work.tensors, work.index, begin, end); });
  Finish(work);
  return work.tensors.size();
}

size_t FusedTensors::Sgd(const SgdOptions& options, const std::vector<bool>& fresh,
                         double grad_factor) {
  c10::NoGradGuard no_grad;
  auto work = Gather<SgdTensor>();
  for (size_t j = 0; j < work.tensors.size(); ++j) {
    const bool first = !fresh.empty() && fresh[work.which[j]];
    work.tensors[j].factors = {.grad = static_cast<float>(grad_factor),
                               .l2 = static_cast<float>(options.weight_decay),
                               .keep = first ? 0.0f : static_cast<float>(options.momentum),
                               .take = first ? 1.0f : static_cast<float>(1 - options.dampening),
                               .momentum = static_cast<float>(options.momentum),
                               .lr = static_cast<float>(options.lr),
                               .nesterov = options.nesterov};
  }
  InParallel(work.index,
             [&](uint64_t begin, uint64_t end) { RunSgd(work.tensors, work.index, begin, end); });
  Finish(work);
  return work.tensors.size();
}

size_t FusedTensors::Lamb(const LambOptions& options, double grad_factor) {
  c10::NoGradGuard no_grad;
  auto work = Gather<LambTensor>();
  BiasCorrections corrections(options.adam);
  for (size_t j = 0; j < work.tensors.size(); ++j) {
    corrections.MoveTo(NextStep(work.which[j]));
    work.tensors[j].factors = FactorsOf(options, corrections, grad_factor);
    work.tensors[j].rate = static_cast<float>(options.adam.lr);
  }
  std::vector<double> param_squares(options.trust_ratio ? work.index.Granules() : 0);
  std::vector<double> update_squares(param_squares.size());
  const bool wanted = !param_squares.empty();
  InParallel(work.index, [&](uint64_t begin, uint64_t end) {
    RunLambMoments(work.tensors, work.index, begin, end, wanted ? param_squares.data() : nullptr,
                   wanted ? update_squares.data() : nullptr);
  });
  if (wanted) ApplyTrustRatios(work.index, param_squares, update_squares, work.tensors);
  InParallel(work.index, [&](uint64_t begin, uint64_t end) {
    RunLambStep(work.tensors, work.index, begin, end);
  });
  Finish(work);
  return work.tensors.size();
}

double FusedTensors::GradSquares() const {
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  std::vector<OptimTensor> tensors;
  FlatIndex index;
  for (size_t i = 0; i < params_.size(); ++i) {
    at::Tensor grad = Grad(i);
    if (!grad.defined()) continue;
    if (!LiesAs(grad, params_[i])) grad = grad.contiguous();
    OptimTensor tensor;
    tensor.grad = grad.const_data_ptr();
    tensor.elems = static_cast<uint64_t>(grad.numel());
    tensor.grad_type = TypeOf(grad);
    index.Add(tensor.elems, SizeOf(tensor.grad_type));
    tensors.push_back(tensor);
    grads.push_back(std::move(grad));
  }
  std::vector<double> sums(index.Granules());
  InParallel(index, [&](uint64_t begin, uint64_t end) {
    RunGradSquares(tensors, index, begin, end, sums.data());
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace thalweg
