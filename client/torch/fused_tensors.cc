#include "client/torch/fused_tensors.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/torch/in_parallel.h"
#include "kernels/optim/granule_sums.h"

namespace thalweg {
namespace {

// Returns `work` with what an optimizer adds to each tensor; complete(j, &tensor) sets it.
template <class Tensor, class Complete>
std::vector<Tensor> Completed(const TensorGroup::Work& work, FlatIndex* index,
                              const Complete& complete) {
  std::vector<Tensor> tensors(work.tensors.size());
  for (size_t j = 0; j < tensors.size(); ++j) {
    static_cast<OptimTensor&>(tensors[j]) = work.tensors[j];
    complete(j, &tensors[j]);
    index->Add(tensors[j].elems, StepBytes(tensors[j]));
  }
  return tensors;
}

// torch makes steps of this form; reading one through torch takes as long as a thousand elements.
bool IsPlainStep(const at::Tensor& step) {
  return step.is_cpu() && step.scalar_type() == at::kFloat;
}

// The latest step's corrections are cached: most parameters have done equally many steps.
class Corrections {
 public:
  explicit Corrections(const AdamSettings& settings) : settings_(settings) {}

  const BiasCorrections& At(double step) {
    if (step != step_) {
      step_ = step;
      latest_ = BiasCorrectionsAt(settings_, step);
    }
    return latest_;
  }

 private:
  const AdamSettings& settings_;
  double step_ = 0;
  BiasCorrections latest_;
};

// Multiplies each rate by its tensor's trust ratio.
void ApplyTrustRatios(const FlatIndex& index, std::span<const double> param_squares,
                      std::span<const double> update_squares, std::vector<LambTensor>& tensors) {
  for (size_t j = 0; j < tensors.size(); ++j) {
    const uint64_t first = index.FirstGranule(j);
    const uint64_t count = FlatIndex::GranulesOf(tensors[j].elems);
    tensors[j].rate =
        TrustedRate(tensors[j].rate, TotalOfGranules(param_squares.subspan(first, count)),
                    TotalOfGranules(update_squares.subspan(first, count)));
  }
}

}  // namespace

FusedTensors::FusedTensors(TensorGroup group) : group_(std::move(group)) {
  if (group_.device().is_cpu()) return;
  throw NotFusable(absl::StrCat("thalweg: parameters are on ", group_.device().str(),
                                ", expected them on the CPU"));
}

double FusedTensors::NextStep(size_t i) const {
  if (group_.steps().empty()) return 1;
  const at::Tensor& step = group_.steps()[i];
  return IsPlainStep(step) ? *step.const_data_ptr<float>() + 1.0 : step.item<double>() + 1;
}

void FusedTensors::Finish(const TensorGroup::Work& work) const {
  group_.Finish(work);
  if (group_.steps().empty()) return;
  for (const size_t i : work.which) {
    const at::Tensor& step = group_.steps()[i];
    if (IsPlainStep(step)) {
      *step.mutable_data_ptr<float>() = static_cast<float>(NextStep(i));
    } else {
      step.fill_(NextStep(i));
    }
  }
}

size_t FusedTensors::Adam(const AdamSettings& settings, double grad_scale, double grad_squares) {
  c10::NoGradGuard no_grad;
  const TensorGroup::Work work = group_.Gather();
  const double grad = GradFactorOf(settings, 1 / grad_scale, grad_squares);
  Corrections corrections(settings);
  FlatIndex index;
  const auto tensors = Completed<AdamTensor>(work, &index, [&](size_t j, AdamTensor* tensor) {
    tensor->factors = FactorsOf(settings, corrections.At(NextStep(work.which[j])), grad);
  });
  InParallel(index, [&](uint64_t begin, uint64_t end) { RunAdam(tensors, index, begin, end); });
  Finish(work);
  return tensors.size();
}

size_t FusedTensors::Sgd(const SgdSettings& settings, double grad_scale, double grad_squares) {
  c10::NoGradGuard no_grad;
  const TensorGroup::Work work = group_.Gather();
  const double grad = GradFactorOf(settings, 1 / grad_scale, grad_squares);
  FlatIndex index;
  const auto tensors = Completed<SgdTensor>(work, &index, [&](size_t j, SgdTensor* tensor) {
    tensor->factors = FactorsOf(settings, NextStep(work.which[j]) == 1, grad);
  });
  InParallel(index, [&](uint64_t begin, uint64_t end) { RunSgd(tensors, index, begin, end); });
  Finish(work);
  return tensors.size();
}

size_t FusedTensors::Lamb(const LambSettings& settings, double grad_scale, double grad_squares) {
  c10::NoGradGuard no_grad;
  const TensorGroup::Work work = group_.Gather();
  const double grad = GradFactorOf(settings, 1 / grad_scale, grad_squares);
  Corrections corrections(settings);
  FlatIndex index;
  auto tensors = Completed<LambTensor>(work, &index, [&](size_t j, LambTensor* tensor) {
    tensor->factors = FactorsOf(settings, corrections.At(NextStep(work.which[j])), grad);
    tensor->rate = static_cast<float>(RateOf(settings));
  });
  std::vector<double> param_squares(settings.trust_ratio ? index.Granules() : 0);
  std::vector<double> update_squares(param_squares.size());
  const bool wanted = !param_squares.empty();
  InParallel(index, [&](uint64_t begin, uint64_t end) {
    RunLambMoments(tensors, index, begin, end, wanted ? param_squares.data() : nullptr,
                   wanted ? update_squares.data() : nullptr);
  });
  if (wanted) ApplyTrustRatios(index, param_squares, update_squares, tensors);
  InParallel(index, [&](uint64_t begin, uint64_t end) { RunLambStep(tensors, index, begin, end); });
  Finish(work);
  return tensors.size();
}

double FusedTensors::GradSquares() const {
  c10::NoGradGuard no_grad;
  const TensorGroup::Work work = group_.Gather();
  FlatIndex index;
  for (const OptimTensor& tensor : work.tensors) index.Add(tensor.elems, SizeOf(tensor.grad_type));
  std::vector<double> sums(index.Granules());
  InParallel(index, [&](uint64_t begin, uint64_t end) {
    RunGradSquares(work.tensors, index, begin, end, sums.data());
  });
  return TotalOfGranules(sums);
}

}  // namespace thalweg
