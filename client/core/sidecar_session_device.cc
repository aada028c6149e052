// This file holds the parts of SidecarSession for gradients in a device's memory.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "client/core/sidecar_session.h"
#include "core/base/status_macros.h"

namespace thalweg {

void SidecarSession::SubmitFromDevice(BucketId id, DeviceGradient gradient, Notes notes,
                                      Done done) {
  SessionCallback callback{std::move(done), SessionCallback::On::kCompletionThread};
  ipc::Submit submit{.id = id, .unused = std::move(notes.unused), .settings = notes.settings};
  const auto begun = BeginRound(std::move(submit), gradient.bytes.size(), &gradient, callback);
  if (!begun.ok()) {
    Refuse(std::move(callback.done), begun.status());
    return;
  }
  SessionBucket& bucket = *begun->bucket;
  std::shared_ptr<DevicePath::Lane> lane;
  {
    MutexLock lock(mutex_);
    lane = bucket.lane;
  }
  if (lane == nullptr) return;  // closed in the meantime, which has failed the round
  const TimePoint start = Now();
  const absl::Status queued = path_->Send(lane, gradient, bucket.plan);
  if (!queued.ok()) {
    FailForAll(queued);
    return;
  }
  if (trace_) TraceCopyIn(id, bucket, start);
  {
    MutexLock lock(mutex_);
    stats_.copy_seconds += ToSeconds(Now() - start);
  }
  const absl::Status sent = TellNoted(begun->connection, bucket.submit);
  if (!sent.ok()) Fail(sent);
}

absl::StatusOr<ReducedBucket> SidecarSession::Land(const SessionLanding& landing) {
  const auto fetch = [&]() -> absl::StatusOr<DeviceEvent> {
    // The device is bound each time, because the last callback may have changed the thread's
    // device.
    THALWEG_RETURN_IF_ERROR(options_.device->BindThread());
    MutexLock lock(landing_);
    return path_->Fetch(landing.lane, landing.result, landing.gradient);
  };
  const auto arrived = fetch();
  if (!arrived.ok()) {
    FailForAll(arrived.status());
    return arrived.status();
  }
  return ReducedBucket{landing.gradient.bytes, landing.gradient.owner, *arrived};
}

void SidecarSession::FailForAll(const absl::Status& why) {
  // The reason is set before the sidecar hears of it, whose answer would otherwise become the
  // reason.
  if (!SetFailed(why)) return;
  // A failure here has no consequence: the sidecar is already gone.
  connection()->Send(ipc::Fail{why.code(), std::string(why.message())}).IgnoreError();
  connection()->Shutdown();
}

bool SidecarSession::CanPartInOrder() {
  MutexLock lock(mutex_);
  const bool is_idle = std::all_of(buckets_.begin(), buckets_.end(), [](const auto& entry) {
    return entry.second.second->callback.done == nullptr;
  });
  parts_in_order_ = status_.ok() && is_idle && !UsesArenas();
  return parts_in_order_;
}

void SidecarSession::ReleaseDevice() {
  // If the device cannot be bound it is lost, which Close finds out.
  options_.device->BindThread().IgnoreError();
  const bool is_drained = path_->Close(Now() + options_.timeout);
  std::vector<std::shared_ptr<DevicePath::Lane>> lanes;
  {
    MutexLock lock(mutex_);
    for (auto& [index, entry] : buckets_) {
      for (auto* lane : {&entry.second->lane, &entry.second->old_lane}) {
        if (*lane != nullptr) lanes.push_back(std::exchange(*lane, nullptr));
      }
    }
  }
  if (UsesArenas() || (is_drained && Part(lanes))) return;
  static Mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<DevicePath::Lane>>();
  MutexLock lock(mutex);
  kept->insert(kept->end(), lanes.begin(), lanes.end());
}

bool SidecarSession::Part(const std::vector<std::shared_ptr<DevicePath::Lane>>& lanes) {
  {
    MutexLock lock(mutex_);
    if (!parts_in_order_) return false;
  }
  for (const auto& lane : lanes) path_->CloseResult(*lane);
  connection()->Send(ipc::Leave{}).IgnoreError();
  MutexLock lock(mutex_);
  return changed_.WaitUntil(mutex_, Now() + options_.timeout,
                            [&]()
                                ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return sidecar_hung_up_; });
}

}  // namespace thalweg
