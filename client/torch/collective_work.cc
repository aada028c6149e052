#include "client/torch/collective_work.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/clock.h"

namespace thalweg {
namespace {

// Returns what profilers call the operation: the names of torch's own back ends, which its tools
// know. Not null.
const char* TitleOf(c10d::OpType type) {
  using Type = c10d::OpType;
  switch (type) {
    case Type::BROADCAST:
      return "thalweg:broadcast";
    case Type::ALLREDUCE:
    case Type::ALLREDUCE_COALESCED:
      return "thalweg:all_reduce";
    case Type::REDUCE:
      return "thalweg:reduce";
    case Type::ALLGATHER:
    case Type::_ALLGATHER_BASE:
    case Type::ALLGATHER_COALESCED:
      return "thalweg:all_gather";
    case Type::GATHER:
      return "thalweg:gather";
    case Type::SCATTER:
      return "thalweg:scatter";
    case Type::REDUCE_SCATTER:
    case Type::_REDUCE_SCATTER_BASE:
      return "thalweg:reduce_scatter";
    case Type::ALLTOALL:
    case Type::ALLTOALL_BASE:
      return "thalweg:all_to_all";
    case Type::SEND:
      return "thalweg:send";
    case Type::RECV:
    case Type::RECVANYSOURCE:
      return "thalweg:recv";
    case Type::BARRIER:
      return "thalweg:barrier";
    default:
      return "thalweg:collective";
  }
}

// A future must know of the devices on which its value is.
std::vector<c10::Device> DevicesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    const c10::Device device = tensor.device();
    if (!device.is_cpu() && std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

std::exception_ptr ErrorOf(const absl::Status& status) {
  return std::make_exception_ptr(std::runtime_error(absl::StrCat("thalweg: ", status.message())));
}

// Torch may throw on a thread on which nobody would catch it.
absl::Status Try(const std::function<void()>& then) {
  try {
    then();
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StripPrefix(error.what(), "thalweg: "));
  }
  return absl::OkStatus();
}

}  // namespace

CollectiveWork::CollectiveWork(int rank, c10d::OpType type, const std::vector<at::Tensor>& inputs,
                               std::vector<at::Tensor> outputs, size_t count, uint64_t sequence)
    : Work(rank, type, TitleOf(type), inputs),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), DevicesOf(outputs_))),
      left_(count) {}

void CollectiveWork::FinishOne(const absl::Status& status) {
  absl::Status error;
  {
    std::lock_guard lock(mutex_);
    if (!status.ok() && first_error_.ok()) first_error_ = status;
    if (--left_ > 0) return;
    error = first_error_;
  }
  // `then` refers to tensors; they are released here, not with the work.
  const auto then = std::exchange(then_, nullptr);
  if (error.ok() && then != nullptr) error = Try(then);
  finish(error.ok() ? nullptr : ErrorOf(error));
  if (error.ok()) {
    future_->markCompleted(c10::IValue(outputs_));
  } else {
    future_->setError(ErrorOf(error));
  }
}

bool CollectiveWork::isCompleted() {
  std::lock_guard lock(mutex_);
  return completed_ && future_->completed();
}

bool CollectiveWork::isSuccess() const {
  std::lock_guard lock(mutex_);
  return completed_ && exception_ == nullptr;
}

std::exception_ptr CollectiveWork::exception() const {
  std::lock_guard lock(mutex_);
  return exception_;
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (!completed_ && before_wait_ != nullptr) {
    lock.unlock();
    const absl::Status may_wait = before_wait_();
    if (!may_wait.ok()) throw std::runtime_error(absl::StrCat("thalweg: ", may_wait.message()));
    lock.lock();
  }
  const auto is_done = [this] { return completed_; };
  if (timeout <= kNoTimeout) {
    cv_.wait(lock, is_done);  // the session ends what takes too long
  } else if (!cv_.wait_for(lock, Bounded(timeout), is_done)) {
    throw std::runtime_error(absl::StrCat("thalweg: ", c10d::opTypeToString(opType_), " ",
                                          sequence_, " did not complete within ", timeout.count(),
                                          " ms, as wait() was told"));
  }
  if (exception_ != nullptr) std::rethrow_exception(exception_);
  lock.unlock();
  future_->wait();      // it is complete a moment later; its callbacks are not waited for
  Work::synchronize();  // torch forgets a work that has been waited for
  return true;
}

}  // namespace thalweg
