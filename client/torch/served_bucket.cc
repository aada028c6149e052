#include "client/torch/served_bucket.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/torch/device_gradient.h"
#include "client/torch/tensor.h"
#include "kernels/optim/granule_sums.h"

namespace thalweg {
namespace {

void ThrowUnless(const absl::Status& status) {
  if (!status.ok()) Throw(std::string(status.message()));
}

BucketLayout LayoutOf(const ServedBucket::Parameters& parameters) {
  BucketLayout layout;
  for (const auto& [name, parameter] : parameters) {
    const DType dtype = CheckReducible(parameter, absl::StrCat("parameter ", name), c10::kCPU);
    if (layout.tensors.empty()) layout.dtype = dtype;
    if (dtype != layout.dtype) {
      Throw(absl::StrCat("parameter ", name, " is ", Name(dtype), ", others of its bucket are ",
                         Name(layout.dtype)));
    }
    layout.tensors.push_back({name, parameter.sizes().vec()});
  }
  return layout;
}

at::Tensor SquaresOf(const ReducedBucket& reduced) {
  at::Tensor numbers = at::empty({static_cast<int64_t>(reduced.squares.size()) + 1}, at::kDouble);
  auto* const out = numbers.mutable_data_ptr<double>();
  std::copy(reduced.squares.begin(), reduced.squares.end(), out);
  out[reduced.squares.size()] = static_cast<double>(reduced.nonfinite_elems);
  return numbers;
}

SnapshotReport Ask(Session& session, SnapshotAction action, SnapshotId id) {
  absl::StatusOr<SnapshotReport> report = session.Snapshots(action, id);
  ThrowUnless(report.status());
  return *std::move(report);
}

}  // namespace

ServedBucket::ServedBucket(std::shared_ptr<Session> session, uint32_t number,
                           const Parameters& parameters, const UpdateRule& update)
    : session_(std::move(session)),
      id_{.index = number},
      type_(parameters.empty() ? at::kFloat : parameters[0].second.scalar_type()),
      commits_(update.commits) {
  ThrowUnless(session_->RegisterServedBucket(id_, LayoutOf(parameters), update));
}

ServedBucket::Future ServedBucket::Push(const at::Tensor& gradients, uint64_t settings,
                                        double waited_seconds) {
  CheckReducible(gradients, absl::StrCat("gradients of bucket ", id_.index), c10::kCPU);
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  session_->Submit(
      id_, BytesOf(gradients),
      {.settings = settings, .waited_ns = static_cast<uint64_t>(waited_seconds * 1e9)},
      [future, type = type_, commits = commits_](absl::StatusOr<ReducedBucket> result) {
        if (!result.ok()) return future->setError(ToException(result.status()));
        if (commits) return future->markCompleted(SquaresOf(*result));
        future->markCompleted(Wrap(*std::move(result), type));
      });
  return future;
}

ServedBucket::Future ServedBucket::Pull(uint64_t settings) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  session_->Pull(id_, settings, [future, type = type_](absl::StatusOr<ReducedBucket> weights) {
    if (!weights.ok()) return future->setError(ToException(weights.status()));
    future->markCompleted(Wrap(*std::move(weights), type));
  });
  return future;
}

ServedBucket::Future ServedBucket::Measure(uint64_t settings) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  session_->Measure(id_, settings, [future](absl::StatusOr<ReducedBucket> measured) {
    if (!measured.ok()) return future->setError(ToException(measured.status()));
    future->markCompleted(SquaresOf(*measured));
  });
  return future;
}

std::pair<std::optional<at::Tensor>, uint64_t> ServedBucket::Read(uint32_t slice) const {
  const absl::StatusOr<WeightsSlice> weights = session_->ReadWeights(id_, slice);
  ThrowUnless(weights.status());
  if (weights->values.empty()) return {std::nullopt, weights->steps};
  at::Tensor values = at::empty({static_cast<int64_t>(weights->values.size())}, at::kFloat);
  std::memcpy(values.data_ptr(), weights->values.data(), weights->values.size() * sizeof(float));
  return {std::move(values), weights->steps};
}

void ServedBucket::Write(uint32_t slice, const std::optional<at::Tensor>& values, uint64_t steps) {
  if (!values) return ThrowUnless(session_->WriteWeights(id_, slice, {}, steps));
  const DType dtype =
      CheckReducible(*values, absl::StrCat("weights of bucket ", id_.index), c10::kCPU);
  if (dtype != DType::kFloat32) {
    Throw(absl::StrCat("weights of bucket ", id_.index, " are ", Name(dtype), ", expected fp32"));
  }
  ThrowUnless(session_->WriteWeights(
      id_, slice, {values->const_data_ptr<float>(), static_cast<size_t>(values->numel())}, steps));
}

std::pair<bool, Snapshots> ListSnapshots(Session& session) {
  const SnapshotReport report = Ask(session, SnapshotAction::kList, {});
  Snapshots complete;
  for (const SnapshotId& id : report.complete) complete.emplace_back(id.branch, id.step);
  return {report.is_writing, std::move(complete)};
}

bool TakeSnapshot(Session& session, uint64_t branch, uint64_t step) {
  return Ask(session, SnapshotAction::kTake, {branch, step}).has_begun;
}

void RestoreSnapshot(Session& session, uint64_t branch, uint64_t step) {
  Ask(session, SnapshotAction::kRestore, {branch, step});
}

double TotalOfSquares(const at::Tensor& squares) {
  return TotalOfGranules({squares.const_data_ptr<double>(), static_cast<size_t>(squares.numel())});
}

GroupStep GroupStepOf(const std::map<std::string, double>& settings) {
  GroupStep step;
  const std::map<std::string, double*> fields = {
      {"lr", &step.lr},       {"weight_decay", &step.weight_decay}, {"momentum", &step.momentum},
      {"eps", &step.eps},     {"dampening", &step.dampening},       {"beta1", &step.beta1},
      {"beta2", &step.beta2}, {"trust_ratio", &step.trust_ratio},
  };
  for (const auto& [name, value] : settings) {
    const auto field = fields.find(name);
    if (field == fields.end()) Throw(absl::StrCat("there is no setting '", name, "' of an update"));
    *field->second = value;
  }
  return step;
}

}  // namespace thalweg
