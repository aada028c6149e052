#include "client/torch/tensor_group.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace thalweg {
namespace {

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

std::string Shape(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

at::Device DeviceOf(const std::vector<at::Tensor>& params) {
  return params.empty() ? at::Device(at::kCPU) : params.front().device();
}

void Check(const at::Tensor& tensor, const char* what, at::Device device) {
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    throw NotFusable(absl::StrCat("thalweg: a ", what, " of ", tensor.dim(), " dimensions is ", got,
                                  ", expected ", expected, ": use torch's own optimizer for it"));
  };
  if (tensor.layout() != at::kStrided) refuse("sparse", "a dense one");
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    refuse(absl::StrCat("on ", tensor.device().str()), "one on the CPU or a CUDA device");
  }
  if (tensor.device() != device) {
    refuse(absl::StrCat("on ", tensor.device().str()),
           absl::StrCat("one on ", device.str(), " like the group's first parameter"));
  }
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) refuse("a subclass", "a plain tensor");
  const at::ScalarType type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) {
    refuse(c10::toString(type), "Float, Half or BFloat16");
  }
}

// Throws unless `tensor` can be updated element by element with its parameter. `param.data = …` may
// have changed the parameter since its state was made.
void CheckFits(const at::Tensor& tensor, const char* what, const at::Tensor& param) {
  Check(tensor, what, param.device());
  if (tensor.sizes() == param.sizes()) return;
  throw NotFusable(absl::StrCat("thalweg: a ", what, " has the shape ", Shape(tensor),
                                ", its parameter ", Shape(param),
                                ": clear gradients and state of a parameter that changes size"));
}

void CheckState(const at::Tensor& state, const at::Tensor& param) {
  CheckFits(state, "state", param);
  if (state.scalar_type() == at::kFloat) return;
  throw NotFusable(absl::StrCat("thalweg: the state of a parameter is ",
                                c10::toString(state.scalar_type()), ", expected Float"));
}

// Returns whether the elements of `tensor` lie in memory in the same order as those of `like`.
bool LiesAs(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.is_non_overlapping_and_dense() && tensor.strides() == like.strides();
}

at::Tensor CopyAs(const at::Tensor& tensor, const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor);
}

// The version tells autograd, which refuses a backward pass through values that have changed since.
void BumpVersion(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void CheckFusable(const std::vector<at::Tensor>& params) {
  const at::Device device = DeviceOf(params);
  for (const at::Tensor& param : params) {
    Check(param, "parameter", device);
    if (param.grad().defined()) Check(param.grad(), "gradient", device);
  }
}

TensorGroup::TensorGroup(std::vector<at::Tensor> params,
                         std::vector<std::vector<at::Tensor>> states, std::vector<at::Tensor> steps,
                         std::vector<std::optional<at::Tensor>> copies)
    : params_(std::move(params)),
      states_(std::move(states)),
      steps_(std::move(steps)),
      copies_(std::move(copies)),
      device_(DeviceOf(params_)) {
  for (size_t i = 0; i < params_.size(); ++i) CheckMember(i);
}

void TensorGroup::CheckGrads() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].grad().defined()) CheckMember(i);
  }
}

void TensorGroup::CheckMember(size_t i) const {
  const at::Tensor& param = params_[i];
  Check(param, "parameter", device_);
  if (param.grad().defined()) CheckFits(param.grad(), "gradient", param);
  for (const auto& state : states_) CheckState(state[i], param);
  if (!copies_.empty() && copies_[i].has_value()) CheckFits(*copies_[i], "copy", param);
}

at::Tensor TensorGroup::Grad(size_t i) const {
  const at::Tensor& grad = params_[i].grad();
  if (!grad.defined()) return grad;
  CheckMember(i);
  return grad.is_neg() ? grad.resolve_neg() : grad;
}

TensorGroup::Work TensorGroup::Gather() const {
  Work work;
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
    OptimTensor tensor;
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
    work.tensors.push_back(tensor);
    work.which.push_back(i);
  }
  return work;
}

void TensorGroup::Finish(const Work& work) const {
  for (const Moved& moved : work.moved) moved.original.copy_(moved.laid);
  for (const size_t i : work.which) {
    BumpVersion(params_[i]);
    if (!copies_.empty() && copies_[i].has_value()) BumpVersion(*copies_[i]);
  }
}

}  // namespace thalweg
