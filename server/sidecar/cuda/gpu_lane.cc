#include "server/sidecar/cuda/gpu_lane.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/mutex.h"
#include "core/base/status_macros.h"

namespace thalweg {

struct GpuLane::Holdings {
  Holdings(std::shared_ptr<DeviceRuntime> runtime, Duration how_long)
      : gpu(std::move(runtime)), patience(how_long) {}
  ~Holdings() {
    for (void* memory : opened) gpu->CloseMemory(memory);
    for (void* memory : device_memory) gpu->FreeMemory(memory);
    for (void* memory : host_memory) gpu->FreeHost(memory);
    for (const DeviceEvent event : events) gpu->DestroyEvent(event);
    if (stream != nullptr) gpu->DestroyStream(stream);
  }

  const std::shared_ptr<DeviceRuntime> gpu;
  const Duration patience;
  DeviceStream stream = nullptr;
  // It is queued behind everything else, as of the last wait; null: it could not be queued.
  StreamProgress* idle = nullptr;
  Mutex idle_mutex;  // one thread waits at a time
  Mutex mutex;
  std::vector<void*> device_memory;
  std::vector<void*> host_memory;
  std::vector<void*> opened;
  std::vector<DeviceEvent> events;
  std::deque<StreamProgress> progress;  // the stream has their addresses
  std::shared_ptr<DeviceGroup> group;   // null: no group
};

struct GpuLane::LeftBehind {
  static LeftBehind& Get() {
    static auto* const left_behind = new LeftBehind();
    return *left_behind;
  }

  bool Has(const DeviceRuntime& gpu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return IsStuck(gpu) || std::any_of(holdings.begin(), holdings.end(),
                                       [&](const auto& each) { return each->gpu.get() == &gpu; });
  }
  // Returns whether a lane that still exists is stuck there.
  bool IsStuck(const DeviceRuntime& gpu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::erase_if(stuck, [](const auto& each) { return each.second->Wait(1, Now()) == 1; });
    return std::any_of(stuck.begin(), stuck.end(),
                       [&](const auto& each) { return each.first->gpu.get() == &gpu; });
  }
  // Takes out what is on GPUs of which all that was left behind is idle.
  std::vector<std::unique_ptr<Holdings>> TakeIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  Mutex mutex;
  std::vector<std::unique_ptr<Holdings>> holdings ABSL_GUARDED_BY(mutex);
  // What lanes that still exist have not done in time, and what counts to 1 when it is done.
  std::map<const Holdings*, const StreamProgress*> stuck ABSL_GUARDED_BY(mutex);
};

absl::StatusOr<std::unique_ptr<GpuLane>> GpuLane::Create(std::shared_ptr<DeviceRuntime> gpu,
                                                         Duration patience) {
  SweepLeftBehind();
  auto holdings = std::make_unique<Holdings>(std::move(gpu), patience);
  THALWEG_RETURN_IF_ERROR(holdings->gpu->BindThread());
  THALWEG_ASSIGN_OR_RETURN(holdings->stream, holdings->gpu->CreateStream());
  return std::unique_ptr<GpuLane>(new GpuLane(std::move(holdings)));
}

GpuLane::GpuLane(std::unique_ptr<Holdings> holdings) : holdings_(std::move(holdings)) {}

GpuLane::~GpuLane() {
  SweepLeftBehind();
  Holdings& held = *holdings_;
  absl::Status idle = WaitUntilIdle();
  if (const auto joined = group(); joined != nullptr && !idle.ok() && !absl::IsUnavailable(idle)) {
    // The queued work does not end by itself.
    joined->Fail(idle);
    joined->Abort();
    if (held.idle != nullptr) {
      idle = held.idle->WaitFor(*held.gpu, held.stream, nullptr, 1, held.patience);
    }
  }
  // CUDA lets whoever frees memory wait for all of a GPU's streams: never behind one that is stuck.
  LeftBehind& left = LeftBehind::Get();
  MutexLock lock(left.mutex);
  const bool may_free = idle.ok() && !left.Has(*held.gpu);
  left.stuck.erase(&held);
  // Otherwise the GPU may still read and write all this, or is lost.
  if (!may_free) left.holdings.push_back(std::move(holdings_));
}

bool GpuLane::IsBlocked(const DeviceRuntime& gpu) {
  LeftBehind& left = LeftBehind::Get();
  MutexLock lock(left.mutex);
  return left.Has(gpu);
}

absl::Status GpuLane::WaitUntilIdle() {
  Holdings& held = *holdings_;
  MutexLock lock(held.idle_mutex);
  held.idle = nullptr;
  THALWEG_RETURN_IF_ERROR(Bind());
  // It is new each time: one whose wait timed out is still queued.
  StreamProgress& idle = MakeProgress(1);
  THALWEG_RETURN_IF_ERROR(idle.Mark(*held.gpu, held.stream, 1));
  held.idle = &idle;
  LeftBehind& left = LeftBehind::Get();
  bool is_stuck = false;
  bool is_blocked = false;
  {
    MutexLock left_lock(left.mutex);
    is_stuck = left.stuck.contains(&held);
    is_blocked = left.Has(*held.gpu);
  }
  // All lanes of a killed worker's bucket, and its workers, may come here: nobody waits twice. What
  // is queued with other GPUs may itself not end, and has to be aborted then.
  if (is_blocked && !is_stuck && group() == nullptr) {
    if (idle.Wait(1, Now()) == 1) return absl::OkStatus();
    return absl::UnavailableError("other work on this GPU does not end");
  }
  const absl::Status status = WaitFor(idle, 1, is_stuck ? Duration::zero() : held.patience);
  if (absl::IsDeadlineExceeded(status)) {
    MutexLock left_lock(left.mutex);
    left.stuck[&held] = &idle;
  }
  return status;
}

std::vector<std::unique_ptr<GpuLane::Holdings>> GpuLane::LeftBehind::TakeIdle() {
  const auto is_idle = [](const Holdings& held) {
    return held.idle != nullptr && held.idle->Wait(1, Now()) == 1 && held.gpu->BindThread().ok();
  };
  std::set<const DeviceRuntime*> blocked;
  for (const auto& each : holdings) {
    if (!is_idle(*each) || IsStuck(*each->gpu)) blocked.insert(each->gpu.get());
  }
  const auto kept = std::partition(holdings.begin(), holdings.end(), [&](const auto& each) {
    return blocked.contains(each->gpu.get());
  });
  std::vector<std::unique_ptr<Holdings>> idle(std::make_move_iterator(kept),
                                              std::make_move_iterator(holdings.end()));
  holdings.erase(kept, holdings.end());
  return idle;
}

void GpuLane::SweepLeftBehind() {
  std::vector<std::unique_ptr<Holdings>> idle;
  {
    LeftBehind& left = LeftBehind::Get();
    MutexLock lock(left.mutex);
    idle = left.TakeIdle();
  }
  for (auto& held : idle) {
    held->gpu->BindThread().IgnoreError();  // as just before
    held.reset();
  }
}

void GpuLane::Close(const Shared& opened) {
  if (IsBlocked(gpu())) return;  // stays until all of the lane goes
  MutexLock lock(holdings_->mutex);
  std::erase(holdings_->opened, opened.memory);
  std::erase(holdings_->events, opened.event);
  gpu().CloseMemory(opened.memory);
  gpu().DestroyEvent(opened.event);
}

DeviceRuntime& GpuLane::gpu() const { return *holdings_->gpu; }
DeviceStream GpuLane::stream() const { return holdings_->stream; }
CudaStream GpuLane::kernel_stream() const {
  return reinterpret_cast<CudaStream>(holdings_->stream);
}

absl::StatusOr<std::byte*> GpuLane::Allocate(uint64_t bytes) {
  THALWEG_ASSIGN_OR_RETURN(void* const memory, gpu().AllocateMemory(bytes));
  MutexLock lock(holdings_->mutex);
  holdings_->device_memory.push_back(memory);
  return static_cast<std::byte*>(memory);
}

absl::StatusOr<std::byte*> GpuLane::AllocateHost(uint64_t bytes) {
  THALWEG_ASSIGN_OR_RETURN(void* const memory, gpu().AllocateHost(bytes));
  MutexLock lock(holdings_->mutex);
  holdings_->host_memory.push_back(memory);
  return static_cast<std::byte*>(memory);
}

StreamProgress& GpuLane::MakeProgress(uint32_t most) {
  MutexLock lock(holdings_->mutex);
  return holdings_->progress.emplace_back(most);
}

absl::Status GpuLane::WaitFor(const StreamProgress& progress, uint32_t count) const {
  return WaitFor(progress, count, holdings_->patience);
}

absl::Status GpuLane::WaitFor(const StreamProgress& progress, uint32_t count,
                              Duration patience) const {
  const auto joined = group();
  absl::Status status = progress.WaitFor(gpu(), stream(), joined.get(), count, patience);
  if (joined == nullptr) return status;
  // Aborted work has also come to an end, but its result is meaningless.
  THALWEG_RETURN_IF_ERROR(joined->Check());
  if (absl::IsDeadlineExceeded(status)) {
    status = absl::DeadlineExceededError(absl::StrCat(
        status.message(), "; it may wait for another GPU of the node, of which NCCL reports no ",
        "error"));
  }
  if (!status.ok()) joined->Fail(status);
  return status;
}

void GpuLane::Join(std::shared_ptr<DeviceGroup> group) {
  MutexLock lock(holdings_->mutex);
  holdings_->group = std::move(group);
}

std::shared_ptr<DeviceGroup> GpuLane::group() const {
  MutexLock lock(holdings_->mutex);
  return holdings_->group;
}

absl::StatusOr<GpuLane::Shared> GpuLane::AllocateShared(uint64_t bytes) {
  Shared shared;
  const uint64_t granules = (bytes + kSharedMemoryGranule - 1) / kSharedMemoryGranule;
  THALWEG_ASSIGN_OR_RETURN(shared.memory,
                           Allocate(std::max<uint64_t>(1, granules) * kSharedMemoryGranule));
  THALWEG_ASSIGN_OR_RETURN(shared.event, gpu().CreateSharedEvent());
  {
    MutexLock lock(holdings_->mutex);
    holdings_->events.push_back(shared.event);
  }
  shared.handles.uuid = gpu().uuid();
  THALWEG_ASSIGN_OR_RETURN(shared.handles.memory, gpu().ShareMemory(shared.memory));
  THALWEG_ASSIGN_OR_RETURN(shared.handles.event, gpu().ShareEvent(shared.event));
  return shared;
}

absl::StatusOr<GpuLane::Shared> GpuLane::Open(const DeviceMemory& handles) {
  if (handles.uuid != gpu().uuid()) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory of GPU ", absl::BytesToHexString(handles.uuid),
                     ", expected one of GPU ", absl::BytesToHexString(gpu().uuid())));
  }
  Shared shared;
  MutexLock lock(holdings_->mutex);
  THALWEG_ASSIGN_OR_RETURN(void* const memory, gpu().OpenMemory(handles.memory));
  holdings_->opened.push_back(memory);
  shared.memory = static_cast<std::byte*>(memory);
  THALWEG_ASSIGN_OR_RETURN(shared.event, gpu().OpenEvent(handles.event));
  holdings_->events.push_back(shared.event);
  return shared;
}

}  // namespace thalweg
