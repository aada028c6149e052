#include "client/torch/device_gradient.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

DeviceStream ToDeviceStream(const c10::Stream& stream) {
  return static_cast<DeviceStream>(stream.native_handle());
}

}  // namespace

std::exception_ptr ToException(const absl::Status& status) {
  return std::make_exception_ptr(std::runtime_error(absl::StrCat("thalweg: ", status.message())));
}

TorchDevice::TorchDevice(std::shared_ptr<Session> session, c10::Device device)
    : runtime_(session->device()),
      device_(device),
      arrivals_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

DeviceGradient TorchDevice::GradientOf(const at::Tensor& tensor) const {
  const c10::impl::VirtualGuardImpl streams(device_.type());
  return {{static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()},
          ToDeviceStream(streams.getStream(device_)),
          std::make_shared<const c10::Storage>(tensor.storage())};
}

c10::intrusive_ptr<c10::ivalue::Future> TorchDevice::MakeFuture() const {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::vector<c10::Device>{device_});
}

void TorchDevice::Complete(c10::ivalue::Future& future, const at::Tensor& tensor,
                           DeviceEvent arrived) const {
  try {
    const absl::Status status = runtime_->Wait(ToDeviceStream(arrivals_), arrived);
    if (!status.ok()) return future.setError(ToException(status));
    // The future records the progress of this stream, and makes its waiters' streams wait for that.
    const c10::StreamGuard guard(arrivals_);
    c10::List<at::Tensor> result;
    result.push_back(tensor);
    future.markCompleted(c10::IValue(std::move(result)));
  } catch (...) {
    if (!future.completed()) future.setError(std::current_exception());
  }
}

}  // namespace thalweg
