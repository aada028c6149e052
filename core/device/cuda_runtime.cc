// This file calls CUDA's runtime once for each call of the interface. Logic belongs elsewhere,
// where a fake can replace this file.
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/device/device_runtime.h"

namespace thalweg {
namespace {

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorNotSupported:
      return absl::StatusCode::kUnimplemented;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

absl::Status ToStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  // The error is cleared, so that the next caller of cudaGetLastError does not get it; errors of
  // the device itself stay.
  cudaGetLastError();
  return absl::Status(CodeOf(error), absl::StrCat("CUDA: ", call, ": ", cudaGetErrorName(error),
                                                  " (", cudaGetErrorString(error), ")"));
}

// For calls whose error nobody can do anything about; it is cleared, too.
void Forget(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
}

cudaStream_t Stream(DeviceStream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Event(DeviceEvent event) { return reinterpret_cast<cudaEvent_t>(event); }

template <class Handle>
std::string Bytes(const Handle& handle) {
  return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

template <class Handle>
absl::StatusOr<Handle> FromBytes(const std::string& bytes) {
  Handle handle;
  if (bytes.size() != sizeof(handle)) {
    return absl::InvalidArgumentError(
        absl::StrCat("CUDA: a shared handle has ", sizeof(handle), " bytes, got ", bytes.size()));
  }
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

class CudaRuntime : public DeviceRuntime {
 public:
  CudaRuntime(int number, std::string uuid, bool registers_read_only)
      : number_(number), uuid_(std::move(uuid)), registers_read_only_(registers_read_only) {}

  std::string uuid() const override { return uuid_; }
  int number() const override { return number_; }

  absl::Status BindThread() override {
    THALWEG_RETURN_IF_ERROR(ToStatus(cudaSetDevice(number_), "cudaSetDevice"));
    // In the default mode, our calls could invalidate the capture of a graph on a user's thread.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return ToStatus(cudaThreadExchangeStreamCaptureMode(&mode),
                    "cudaThreadExchangeStreamCaptureMode");
  }

  absl::StatusOr<DeviceStream> CreateStream() override {
    cudaStream_t stream = nullptr;
    THALWEG_RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                     "cudaStreamCreateWithFlags"));
    return reinterpret_cast<DeviceStream>(stream);
  }
  void DestroyStream(DeviceStream stream) override { Forget(cudaStreamDestroy(Stream(stream))); }

  absl::StatusOr<DeviceEvent> CreateEvent() override {
    cudaEvent_t event = nullptr;
    THALWEG_RETURN_IF_ERROR(ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                     "cudaEventCreateWithFlags"));
    return reinterpret_cast<DeviceEvent>(event);
  }
  void DestroyEvent(DeviceEvent event) override { Forget(cudaEventDestroy(Event(event))); }

  absl::Status Record(DeviceEvent event, DeviceStream stream) override {
    return ToStatus(cudaEventRecord(Event(event), Stream(stream)), "cudaEventRecord");
  }
  absl::Status Wait(DeviceStream stream, DeviceEvent event) override {
    return ToStatus(cudaStreamWaitEvent(Stream(stream), Event(event), 0), "cudaStreamWaitEvent");
  }

  absl::StatusOr<void*> AllocateMemory(size_t bytes) override {
    void* memory = nullptr;
    THALWEG_RETURN_IF_ERROR(ToStatus(cudaMalloc(&memory, bytes), "cudaMalloc"));
    return memory;
  }
  void FreeMemory(void* memory) override { Forget(cudaFree(memory)); }
  absl::StatusOr<void*> AllocateHost(size_t bytes) override {
    void* memory = nullptr;
    THALWEG_RETURN_IF_ERROR(
        ToStatus(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc"));
    return memory;
  }
  void FreeHost(void* memory) override { Forget(cudaFreeHost(memory)); }

  absl::StatusOr<std::string> ShareMemory(void* memory) override {
    cudaIpcMemHandle_t handle;
    THALWEG_RETURN_IF_ERROR(ToStatus(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle"));
    return Bytes(handle);
  }
  absl::StatusOr<void*> OpenMemory(const std::string& shared) override {
    THALWEG_ASSIGN_OR_RETURN(const auto handle, FromBytes<cudaIpcMemHandle_t>(shared));
    void* memory = nullptr;
    THALWEG_RETURN_IF_ERROR(
        ToStatus(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
                 "cudaIpcOpenMemHandle"));
    return memory;
  }
  void CloseMemory(void* memory) override { Forget(cudaIpcCloseMemHandle(memory)); }

  absl::StatusOr<DeviceEvent> CreateSharedEvent() override {
    cudaEvent_t event = nullptr;
    THALWEG_RETURN_IF_ERROR(
        ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
                 "cudaEventCreateWithFlags"));
    return reinterpret_cast<DeviceEvent>(event);
  }
  absl::StatusOr<std::string> ShareEvent(DeviceEvent event) override {
    cudaIpcEventHandle_t handle;
    THALWEG_RETURN_IF_ERROR(
        ToStatus(cudaIpcGetEventHandle(&handle, Event(event)), "cudaIpcGetEventHandle"));
    return Bytes(handle);
  }
  absl::StatusOr<DeviceEvent> OpenEvent(const std::string& shared) override {
    THALWEG_ASSIGN_OR_RETURN(const auto handle, FromBytes<cudaIpcEventHandle_t>(shared));
    cudaEvent_t event = nullptr;
    THALWEG_RETURN_IF_ERROR(
        ToStatus(cudaIpcOpenEventHandle(&event, handle), "cudaIpcOpenEventHandle"));
    return reinterpret_cast<DeviceEvent>(event);
  }

  absl::Status Copy(void* to, const void* from, size_t bytes, DeviceStream stream) override {
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Stream(stream)),
                    "cudaMemcpyAsync on the device");
  }
  absl::Status CopyToHost(void* host, const void* device, size_t bytes,
                          DeviceStream stream) override {
    return ToStatus(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, Stream(stream)),
                    "cudaMemcpyAsync to the host");
  }
  absl::Status CopyToDevice(void* device, const void* host, size_t bytes,
                            DeviceStream stream) override {
    return ToStatus(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, Stream(stream)),
                    "cudaMemcpyAsync to the device");
  }

  absl::Status Launch(DeviceStream stream, void (*function)(void*), void* argument) override {
    return ToStatus(cudaLaunchHostFunc(Stream(stream), function, argument), "cudaLaunchHostFunc");
  }

  absl::Status RegisterHost(const void* begin, size_t bytes, Access access) override {
    unsigned flags = cudaHostRegisterPortable;
    if (access == Access::kReadOnly) {
      if (!registers_read_only_) {
        return absl::UnimplementedError("CUDA: this device cannot lock read-only host memory");
      }
      flags |= cudaHostRegisterReadOnly;
    }
    return ToStatus(cudaHostRegister(const_cast<void*>(begin), bytes, flags), "cudaHostRegister");
  }
  void UnregisterHost(const void* begin) override {
    Forget(cudaHostUnregister(const_cast<void*>(begin)));
  }

  absl::Status Check(DeviceStream stream) override {
    const cudaError_t error = cudaStreamQuery(Stream(stream));
    if (error != cudaErrorNotReady) return ToStatus(error, "cudaStreamQuery");
    cudaGetLastError();
    return absl::OkStatus();
  }

 private:
  const int number_;
  const std::string uuid_;
  const bool registers_read_only_;
};

}  // namespace

int CountCudaDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

absl::StatusOr<std::shared_ptr<DeviceRuntime>> OpenCudaDevice(int number) {
  int read_only = 0;
  const absl::Status status =
      ToStatus(cudaDeviceGetAttribute(&read_only, cudaDevAttrHostRegisterReadOnlySupported, number),
               "cudaDeviceGetAttribute");
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("cuda:", number, " cannot be used, expected a GPU that this ",
                                     "process may use and a driver for it: ", status.message()));
  }
  cudaDeviceProp properties;
  THALWEG_RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, number), "cudaGetDeviceProperties"));
  // The ownership is shared: work queued on the device may outlive the session that queued it.
  return std::make_shared<CudaRuntime>(number, Bytes(properties.uuid), read_only != 0);
}

}  // namespace thalweg
