#include "client/core/copies_in_flight.h"

#include <algorithm>

namespace thalweg {
namespace {

// A waiting thread checks at this interval whether the device still works.
constexpr Duration kLookAtCopies = std::chrono::milliseconds(50);

}  // namespace

struct CopiesInFlight::Copy {
  CopiesInFlight* copies = nullptr;
  Uses uses;
};

CopiesInFlight::CopiesInFlight() = default;
CopiesInFlight::~CopiesInFlight() = default;

absl::StatusOr<CopiesInFlight::Copy*> CopiesInFlight::Begin(Uses uses) {
  auto copy = std::make_unique<Copy>(Copy{this, std::move(uses)});
  MutexLock lock(mutex_);
  if (closed_) return absl::CancelledError("the session was closed");
  Copy* const key = copy.get();
  in_flight_[key] = std::move(copy);
  return key;
}

void CopiesInFlight::Finish(void* copy) {
  auto* const key = static_cast<Copy*>(copy);
  CopiesInFlight& copies = *key->copies;
  MutexLock lock(copies.mutex_);
  const auto found = copies.in_flight_.find(key);
  copies.finished_.push_back(std::move(found->second));
  copies.in_flight_.erase(found);
  copies.changed_.NotifyAll();
}

void CopiesInFlight::Break() {
  MutexLock lock(mutex_);
  broken_ = true;
}

void CopiesInFlight::Reap() {
  std::vector<std::unique_ptr<Copy>> done;  // freed after the lock is released
  {
    MutexLock lock(mutex_);
    done.swap(finished_);
  }
}

bool CopiesInFlight::Close(DeviceRuntime& device, DeviceStream stream, TimePoint deadline) {
  {
    MutexLock lock(mutex_);
    closed_ = true;
  }
  bool is_drained = false;
  bool is_lost = false;
  do {
    is_lost = !device.Check(stream).ok();
    MutexLock lock(mutex_);
    is_lost = is_lost || broken_;
    is_drained = changed_.WaitUntil(
        mutex_, is_lost ? Now() : std::min(deadline, Now() + kLookAtCopies),
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return in_flight_.empty(); });
  } while (!is_drained && !is_lost && Now() < deadline);
  Reap();
  return is_drained;
}

}  // namespace thalweg
