#include "client/core/ipc_path.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "client/core/copies_in_flight.h"
#include "core/base/mutex.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// A SharedMemory is memory of this process that others can open, with its event.
struct SharedMemory {
  void* memory = nullptr;
  DeviceEvent event = nullptr;
  DeviceMemory handles;
};

absl::Status Allocate(DeviceRuntime& device, uint64_t bytes, SharedMemory& shared) {
  const uint64_t granules = (bytes + kSharedMemoryGranule - 1) / kSharedMemoryGranule;
  THALWEG_ASSIGN_OR_RETURN(
      shared.memory, device.AllocateMemory(std::max<uint64_t>(1, granules) * kSharedMemoryGranule));
  THALWEG_ASSIGN_OR_RETURN(shared.event, device.CreateSharedEvent());
  shared.handles.uuid = device.uuid();
  THALWEG_ASSIGN_OR_RETURN(shared.handles.memory, device.ShareMemory(shared.memory));
  THALWEG_ASSIGN_OR_RETURN(shared.handles.event, device.ShareEvent(shared.event));
  return absl::OkStatus();
}

void Free(DeviceRuntime& device, const SharedMemory& shared) {
  if (shared.memory != nullptr) device.FreeMemory(shared.memory);
  if (shared.event != nullptr) device.DestroyEvent(shared.event);
}

class IpcLane final : public DevicePath::Lane {
 public:
  explicit IpcLane(std::shared_ptr<DeviceRuntime> device) : device_(std::move(device)) {}
  ~IpcLane() override {
    CloseResult();
    for (const DeviceEvent event : {made, arrived}) {
      if (event != nullptr) device_->DestroyEvent(event);
    }
    Free(*device_, share);
  }
  void CloseResult() {
    if (result != nullptr) device_->CloseMemory(std::exchange(result, nullptr));
    if (result_made != nullptr) device_->DestroyEvent(std::exchange(result_made, nullptr));
  }

  DeviceMemory memory() const override { return share.handles; }

  absl::Status Open(uint64_t bytes) {
    for (DeviceEvent* event : {&made, &arrived}) {
      THALWEG_ASSIGN_OR_RETURN(*event, device_->CreateEvent());
    }
    return Allocate(*device_, bytes, share);
  }

  SharedMemory share;
  void* result = nullptr;             // the sidecar's, after its answer
  DeviceEvent result_made = nullptr;  // recorded by the sidecar
  DeviceEvent made = nullptr;         // recorded when the producer has made the gradient
  DeviceEvent arrived = nullptr;      // recorded when the result is in the gradient's memory
  bool has_result = false;            // `arrived` has been recorded

 private:
  const std::shared_ptr<DeviceRuntime> device_;
};

}  // namespace

struct IpcPath::Shared {
  explicit Shared(std::shared_ptr<DeviceRuntime> runtime) : device(std::move(runtime)) {}
  ~Shared() { Release(); }
  // Frees everything. Must run on a thread of the device, with nothing queued.
  void Release() {
    Free(*device, std::exchange(probe, {}));
    if (probe_source != nullptr) device->FreeHost(std::exchange(probe_source, nullptr));
    for (DeviceStream* stream : {&out, &in}) {
      if (*stream != nullptr) device->DestroyStream(std::exchange(*stream, nullptr));
    }
  }

  absl::Status Open() {
    for (DeviceStream* stream : {&out, &in}) {
      THALWEG_ASSIGN_OR_RETURN(*stream, device->CreateStream());
    }
    THALWEG_RETURN_IF_ERROR(Allocate(*device, sizeof(kDeviceProbe), probe));
    THALWEG_ASSIGN_OR_RETURN(probe_source, device->AllocateHost(sizeof(kDeviceProbe)));
    std::memcpy(probe_source, kDeviceProbe, sizeof(kDeviceProbe));
    return Queue({}, out, [&]() -> absl::Status {
      THALWEG_RETURN_IF_ERROR(
          device->CopyToDevice(probe.memory, probe_source, sizeof(kDeviceProbe), out));
      return device->Record(probe.event, out);
    });
  }

  // Calls `queue` to queue a copy on `stream`; nothing of `uses` is freed before the copy is done.
  template <class Queueing>
  absl::Status Queue(CopiesInFlight::Uses uses, DeviceStream stream, const Queueing& queue) {
    copies.Reap();
    THALWEG_ASSIGN_OR_RETURN(CopiesInFlight::Copy* const copy, copies.Begin(std::move(uses)));
    absl::Status status = queue();
    if (status.ok()) status = device->Launch(stream, &CopiesInFlight::Finish, copy);
    if (!status.ok()) copies.Break();
    return status;
  }

  const std::shared_ptr<DeviceRuntime> device;
  DeviceStream out = nullptr;
  DeviceStream in = nullptr;
  SharedMemory probe;
  void* probe_source = nullptr;
  CopiesInFlight copies;
  std::optional<bool> closed;  // outcome of Close
};

absl::StatusOr<std::unique_ptr<IpcPath>> IpcPath::Create(std::shared_ptr<DeviceRuntime> device) {
  auto shared = std::make_unique<Shared>(std::move(device));
  const absl::Status opened = shared->Open();
  // its destructor closes what is open
  std::unique_ptr<IpcPath> path(new IpcPath(std::move(shared)));
  if (!opened.ok()) return opened;
  return path;
}

IpcPath::IpcPath(std::unique_ptr<Shared> shared) : shared_(std::move(shared)) {}

IpcPath::~IpcPath() {
  if (Close(Now())) return;
  static Mutex mutex;
  static auto* const left_behind = new std::vector<std::unique_ptr<Shared>>();
  MutexLock lock(mutex);
  left_behind->push_back(std::move(shared_));
}

const DeviceMemory& IpcPath::probe() const { return shared_->probe.handles; }

absl::StatusOr<std::shared_ptr<DevicePath::Lane>> IpcPath::OpenLane(
    std::shared_ptr<BucketArena> /*input*/, uint64_t bytes) {
  auto lane = std::make_shared<IpcLane>(shared_->device);
  THALWEG_RETURN_IF_ERROR(lane->Open(bytes));
  return lane;
}

absl::Status IpcPath::SetResult(Lane& lane, const DeviceMemory& memory) {
  auto& ipc = static_cast<IpcLane&>(lane);
  THALWEG_ASSIGN_OR_RETURN(ipc.result, shared_->device->OpenMemory(memory.memory));
  THALWEG_ASSIGN_OR_RETURN(ipc.result_made, shared_->device->OpenEvent(memory.event));
  return absl::OkStatus();
}

void IpcPath::CloseResult(Lane& lane) { static_cast<IpcLane&>(lane).CloseResult(); }

absl::Status IpcPath::Send(const std::shared_ptr<Lane>& lane, const DeviceGradient& gradient,
                           const ChunkPlan& /*plan*/) {
  const auto& ipc = static_cast<const IpcLane&>(*lane);
  DeviceRuntime& device = *shared_->device;
  const DeviceStream out = shared_->out;
  return shared_->Queue({lane, gradient.owner}, out, [&]() -> absl::Status {
    THALWEG_RETURN_IF_ERROR(device.Record(ipc.made, gradient.producer));
    THALWEG_RETURN_IF_ERROR(device.Wait(out, ipc.made));
    // See Fetch. Without this wait, the sidecar would overwrite the last round's result too early
    // when the framework's producer does not wait for it.
    if (ipc.has_result) THALWEG_RETURN_IF_ERROR(device.Wait(out, ipc.arrived));
    if (!gradient.bytes.empty()) {
      THALWEG_RETURN_IF_ERROR(
          device.Copy(ipc.share.memory, gradient.bytes.data(), gradient.bytes.size(), out));
    }
    return device.Record(ipc.share.event, out);
  });
}

absl::StatusOr<DeviceEvent> IpcPath::Fetch(const std::shared_ptr<Lane>& lane,
                                           std::shared_ptr<const BucketArena> /*result*/,
                                           const DeviceGradient& gradient) {
  auto& ipc = static_cast<IpcLane&>(*lane);
  DeviceRuntime& device = *shared_->device;
  const DeviceStream in = shared_->in;
  const absl::Status queued = shared_->Queue({lane, gradient.owner}, in, [&]() -> absl::Status {
    THALWEG_RETURN_IF_ERROR(device.Wait(in, ipc.result_made));
    if (!gradient.bytes.empty()) {
      THALWEG_RETURN_IF_ERROR(
          device.Copy(gradient.bytes.data(), ipc.result, gradient.bytes.size(), in));
    }
    return device.Record(ipc.arrived, in);
  });
  THALWEG_RETURN_IF_ERROR(queued);
  ipc.has_result = true;
  return ipc.arrived;
}

absl::Status IpcPath::Check() const { return shared_->device->Check(shared_->in); }

bool IpcPath::Close(TimePoint deadline) {
  Shared& shared = *shared_;
  if (!shared.closed.has_value()) {
    shared.closed = shared.copies.Close(*shared.device, shared.in, deadline);
    if (*shared.closed) shared.Release();
  }
  return *shared.closed;
}

}  // namespace thalweg
