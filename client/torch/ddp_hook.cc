#include "client/torch/ddp_hook.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/torch/reducer_access.h"
#include "client/torch/tensor.h"

namespace thalweg {

namespace {

// The sizes by which a codec is to cut the parameter's part of a bucket into rows, where elements
// lie as in the parameter: of one whose rows are not together, such as a matrix by columns, those
// of its memory.
std::vector<int64_t> SizesInMemory(const at::Tensor& parameter) {
  std::vector<int64_t> dims(parameter.dim());
  std::iota(dims.begin(), dims.end(), 0);
  // The place of a dimension of one element means nothing.
  std::erase_if(dims, [&](int64_t dim) { return parameter.size(dim) == 1; });
  const auto outermost = std::max_element(dims.begin(), dims.end(), [&](int64_t a, int64_t b) {
    return parameter.stride(a) < parameter.stride(b);
  });
  const bool has_rows = dims.empty() || outermost == dims.begin();
  if (has_rows || !parameter.is_non_overlapping_and_dense()) return parameter.sizes().vec();
  std::stable_sort(dims.begin(), dims.end(),
                   [&](int64_t a, int64_t b) { return parameter.stride(a) > parameter.stride(b); });
  std::vector<int64_t> sizes;
  for (const int64_t dim : dims) sizes.push_back(parameter.size(dim));
  return sizes;
}

}  // namespace

DdpHook::DdpHook(std::shared_ptr<Session> session, Parameters parameters, c10::Device device,
                 const c10d::Reducer* reducer)
    : session_(std::move(session)),
      parameters_(std::move(parameters)),
      device_(device),
      reducer_(reducer),
      torch_device_(device.is_cpu() ? nullptr
                                    : std::make_shared<const TorchDevice>(session_, device)),
      elems_per_pass_(std::accumulate(
          parameters_.begin(), parameters_.end(), uint64_t{0},
          [](uint64_t sum, const auto& named) { return sum + named.second.elems; })) {}

const DdpHook::Parameter& DdpHook::Find(const at::Tensor& parameter) const {
  const auto found = parameters_.find(parameter.unsafeGetTensorImpl());
  if (found == parameters_.end()) Throw("a gradient bucket has a parameter of another reducer");
  return found->second;
}

BucketLayout DdpHook::LayoutOf(const std::vector<at::Tensor>& parameters, DType dtype) const {
  BucketLayout layout{.dtype = dtype, .tensors = {}};
  layout.tensors.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    layout.tensors.push_back({Find(parameter).name, SizesInMemory(parameter)});
  }
  return layout;
}

std::vector<uint32_t> DdpHook::UnusedOf(const c10d::GradBucket& bucket) const {
  std::vector<uint32_t> unused;
  if (reducer_ == nullptr) return unused;
  const std::vector<bool> are_unused = UnusedParameters(*reducer_);
  if (are_unused.empty()) return unused;
  const auto parameters = bucket.getParameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (are_unused[Find(parameters[i]).number]) unused.push_back(static_cast<uint32_t>(i));
  }
  return unused;
}

size_t DdpHook::NumberOf(const c10d::GradBucket& bucket) {
  size_t number = bucket.getIndex();
  while (!numbers_in_pass_.insert(number).second) ++number;
  elems_in_pass_ += static_cast<uint64_t>(bucket.getBuffer().numel());
  if (bucket.isLast() || elems_in_pass_ >= elems_per_pass_) {
    elems_in_pass_ = 0;
    numbers_in_pass_.clear();
  }
  return number;
}

BucketId DdpHook::Announce(const c10d::GradBucket& bucket, DType dtype) {
  const size_t number = NumberOf(bucket);
  const auto parameters = bucket.getParameters();
  std::vector<const c10::TensorImpl*> addresses;
  addresses.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    addresses.push_back(parameter.unsafeGetTensorImpl());
  }
  const auto elems = static_cast<uint64_t>(bucket.getBuffer().numel());

  const auto known = announced_.find(number);
  BucketId id{.index = static_cast<uint32_t>(number), .generation = 0};
  if (known != announced_.end()) {
    const Announced& last = known->second;
    if (last.dtype == dtype && last.elems == elems && last.parameters == addresses) return last.id;
    id.generation = last.id.generation + 1;
  }

  const BucketLayout layout = LayoutOf(parameters, dtype);
  if (layout.Elems() != elems) {
    Throw(absl::StrCat("gradient bucket ", id.index, " has ", elems,
                       " elements, its parameters have ", layout.Elems()));
  }
  if (const absl::Status status = session_->RegisterBucket(id, layout); !status.ok()) {
    Throw(std::string(status.message()));
  }
  announced_[number] = {id, dtype, elems, std::move(addresses)};
  return id;
}

c10::intrusive_ptr<c10::ivalue::Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const DType dtype =
      CheckReducible(buffer, absl::StrCat("gradient bucket ", bucket.getIndex()), device_);
  // Announcing registers memory with the device, which must be the current one.
  const c10::DeviceGuard guard(device_);
  const BucketId id = Announce(bucket, dtype);
  if (reducer_ != nullptr) ScaleToJoined(*reducer_, buffer);
  if (torch_device_ != nullptr) return SubmitFromDevice(id, buffer, {.unused = UnusedOf(bucket)});

  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  session_->Submit(id, BytesOf(buffer), {.unused = UnusedOf(bucket)},
                   [future, type = buffer.scalar_type()](absl::StatusOr<ReducedBucket> reduced) {
                     if (!reduced.ok()) return future->setError(ToException(reduced.status()));
                     c10::List<at::Tensor> result;
                     result.push_back(Wrap(*std::move(reduced), type));
                     future->markCompleted(c10::IValue(std::move(result)));
                   });
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> DdpHook::SubmitFromDevice(BucketId id,
                                                                  const at::Tensor& buffer,
                                                                  Session::Notes notes) {
  auto future = torch_device_->MakeFuture();
  session_->SubmitFromDevice(
      id, torch_device_->GradientOf(buffer), std::move(notes),
      [future, buffer, device = torch_device_](const absl::StatusOr<ReducedBucket>& reduced) {
        if (!reduced.ok()) return future->setError(ToException(reduced.status()));
        device->Complete(*future, buffer, reduced->arrived);
      });
  return future;
}

at::Tensor DdpHook::parseHookResult(const c10::IValue& result) {
  return c10d::detail::parseCppCommHookResult(result);
}

}  // namespace thalweg
