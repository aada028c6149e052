#include "core/device/fake_runtime.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/base/testing/test_patience.h"

namespace thalweg {
namespace {

// A caller that must wait for a copy waits at most this long: longer than any test holds a stream.

// The names are in the order of FakeRuntime::Call.
constexpr const char* kCallNames[] = {
    "BindThread", "CreateStream", "CreateEvent", "Record",       "Wait",   "Allocate",    "Share",
    "Open",       "Copy",         "CopyToHost",  "CopyToDevice", "Launch", "RegisterHost"};
static_assert(std::size(kCallNames) == static_cast<size_t>(FakeRuntime::Call::kRegisterHost) + 1);

thread_local const FakeRuntime* bound = nullptr;
thread_local bool in_launched_function = false;

}  // namespace

struct FakeRuntime::Stream {
  std::deque<Work> queue;
  bool held = false;
  bool busy = false;
  bool destroyed = false;
  Thread thread;
};

FakeRuntime::FakeRuntime(bool registers_read_only, int number)
    : number_(number), registers_read_only_(registers_read_only) {}

FakeRuntime::~FakeRuntime() {
  std::vector<std::unique_ptr<Stream>> streams;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    streams.swap(streams_);
  }
  streams.clear();  // joins
  MutexLock lock(mutex_);
  for (const auto& [address, memory] : memory_) {
    if (memory.inside != nullptr) munmap(memory.inside, memory.bytes);
    munmap(const_cast<std::byte*>(address), memory.bytes);
  }
}

void FakeRuntime::CheckThread(const char* call) {
  if (in_launched_function) Violation("a launched function called the runtime");
  if (bound != this) Violation(absl::StrCat(call, " on a thread of another device"));
}

absl::Status FakeRuntime::Enter(Call call) {
  if (call != Call::kBindThread) {
    CheckThread(kCallNames[static_cast<size_t>(call)]);
  } else if (in_launched_function) {
    Violation("a launched function called the runtime");
  }
  THALWEG_RETURN_IF_ERROR(failure_);
  const uint32_t number = ++calls_[call];
  const auto to_fail = to_fail_[call].find(number);
  return to_fail == to_fail_[call].end() ? absl::OkStatus() : to_fail->second;
}

void FakeRuntime::Violation(std::string what) { violations_.push_back(std::move(what)); }

FakeRuntime::Stream& FakeRuntime::Of(DeviceStream stream) {
  return *reinterpret_cast<Stream*>(stream);
}

void FakeRuntime::Enqueue(DeviceStream stream, Work work) {
  if (Of(stream).destroyed) Violation("work was queued on a stream that had been destroyed");
  Of(stream).queue.push_back(std::move(work));
  changed_.NotifyAll();
}

absl::Status FakeRuntime::BindThread() {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kBindThread));
  bound = this;
  return absl::OkStatus();
}

bool FakeRuntime::IsBound() const { return bound == this; }

absl::StatusOr<DeviceStream> FakeRuntime::CreateStream() {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kCreateStream));
  streams_.push_back(std::make_unique<Stream>());
  Stream& stream = *streams_.back();
  stream.thread = Thread("fake-stream", [this, &stream] { StreamLoop(stream); });
  return reinterpret_cast<DeviceStream>(&stream);
}

void FakeRuntime::DestroyStream(DeviceStream stream) {
  MutexLock lock(mutex_);
  CheckThread("DestroyStream");
  Of(stream).destroyed = true;
}

absl::StatusOr<DeviceEvent> FakeRuntime::CreateEvent() {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kCreateEvent));
  events_.push_back(std::make_unique<Event>());
  return reinterpret_cast<DeviceEvent>(events_.back().get());
}

void FakeRuntime::DestroyEvent(DeviceEvent event) {
  MutexLock lock(mutex_);
  CheckThread("DestroyEvent");
  reinterpret_cast<Event*>(event)->destroyed = true;
}

absl::Status FakeRuntime::Record(DeviceEvent event, DeviceStream stream) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kRecord));
  auto* e = reinterpret_cast<Event*>(event);
  if (e->destroyed) Violation("an event was recorded that had been destroyed");
  if (e->shared != nullptr) e = e->shared;
  const uint64_t number = ++e->recorded;
  Enqueue(stream, {nullptr, [this, e, number] {
                     MutexLock inner(mutex_);
                     e->reached = std::max(e->reached, number);
                   }});
  return absl::OkStatus();
}

absl::Status FakeRuntime::Wait(DeviceStream stream, DeviceEvent event) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kWait));
  const auto* e = reinterpret_cast<Event*>(event);
  if (e->destroyed) Violation("an event was waited for that had been destroyed");
  if (e->shared != nullptr) e = e->shared;
  const uint64_t number = e->recorded;
  Enqueue(stream, {[e, number] { return e->reached >= number; }, [] {}});
  return absl::OkStatus();
}

absl::Status FakeRuntime::CopyToHost(void* host, const void* device, size_t bytes,
                                     DeviceStream stream) {
  return CopyHost(Call::kCopyToHost, static_cast<std::byte*>(host),
                  static_cast<std::byte*>(const_cast<void*>(device)), bytes, stream);
}

absl::Status FakeRuntime::CopyToDevice(void* device, const void* host, size_t bytes,
                                       DeviceStream stream) {
  return CopyHost(Call::kCopyToDevice, static_cast<std::byte*>(const_cast<void*>(host)),
                  static_cast<std::byte*>(device), bytes, stream);
}

absl::Status FakeRuntime::CopyHost(Call direction, std::byte* host, std::byte* device, size_t bytes,
                                   DeviceStream stream) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(direction));
  if (InsideLocked(device, bytes) == nullptr || InsideLocked(host, 1) != nullptr) {
    Violation("a copy's device side is not in device memory, or its host side is");
    return absl::InternalError("fake: invalid argument");
  }
  const Registered* const range = FindRegistered(host, bytes);
  if (range != nullptr && range->access == Access::kReadOnly && direction == Call::kCopyToHost) {
    Violation("a copy goes to read-only memory");
  }
  const bool registered = range != nullptr;
  const auto done = std::make_shared<bool>(false);
  Enqueue(stream, {[=, this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return MayCopy(direction); },
                   [=, this] {
                     DoCopy(direction, host, device, bytes, registered);
                     MutexLock inner(mutex_);
                     *done = true;
                   }});
  if (registered) return absl::OkStatus();
  ++pageable_copies_;
  if (!changed_.WaitUntil(
          mutex_, Now() + kTestPatience,
          [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return *done || !failure_.ok(); })) {
    Violation("a copy of pageable memory waited for a stream that was held");
  }
  return failure_;
}

absl::Status FakeRuntime::Copy(void* to, const void* from, size_t bytes, DeviceStream stream) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kCopy));
  const auto* const source = static_cast<const std::byte*>(from);
  const auto* const target = static_cast<const std::byte*>(to);
  if (InsideLocked(source, bytes) == nullptr || InsideLocked(target, bytes) == nullptr) {
    Violation("a copy on the device leaves device memory");
    return absl::InternalError("fake: invalid argument");
  }
  Enqueue(stream, {nullptr, [=, this] {
                     MutexLock inner(mutex_);
                     const std::byte* const in = InsideLocked(source, bytes);
                     std::byte* const out = InsideLocked(target, bytes);
                     if (in == nullptr || out == nullptr) {
                       return Violation("device memory was freed before a copy was done");
                     }
                     std::memcpy(out, in, bytes);
                   }});
  return absl::OkStatus();
}

bool FakeRuntime::MayCopy(Call direction) {
  const auto left = copies_left_.find(direction);
  return left == copies_left_.end() || left->second > 0;
}

void FakeRuntime::DoCopy(Call direction, std::byte* host, std::byte* device, size_t bytes,
                         bool registered) {
  std::byte* inside = nullptr;
  {
    MutexLock lock(mutex_);
    inside = InsideLocked(device, bytes);
    if (inside == nullptr) return Violation("device memory was freed before a copy was done");
    if (registered && FindRegistered(host, bytes) == nullptr) {
      return Violation("host memory was unregistered before a copy was done");
    }
    copied_bytes_[direction] += bytes;
    if (const auto left = copies_left_.find(direction); left != copies_left_.end()) --left->second;
  }
  if (direction == Call::kCopyToHost) {
    std::memcpy(host, inside, bytes);
  } else {
    std::memcpy(inside, host, bytes);
  }
}

absl::Status FakeRuntime::Launch(DeviceStream stream, void (*function)(void*), void* argument) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kLaunch));
  Enqueue(stream, {nullptr, [function, argument] {
                     in_launched_function = true;
                     function(argument);
                     in_launched_function = false;
                   }});
  return absl::OkStatus();
}

absl::Status FakeRuntime::RegisterHost(const void* begin, size_t bytes, Access access) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kRegisterHost));
  if (access == Access::kReadOnly && !registers_read_only_) {
    return absl::UnimplementedError("fake: read-only memory cannot be registered");
  }
  if (reinterpret_cast<uintptr_t>(begin) % kPage != 0 || bytes % kPage != 0 || bytes == 0) {
    Violation("memory was registered that is not whole pages");
  }
  if (!registered_.emplace(static_cast<const std::byte*>(begin), Registered{bytes, access})
           .second) {
    Violation("memory was registered twice");
  }
  return absl::OkStatus();
}

void FakeRuntime::UnregisterHost(const void* begin) {
  MutexLock lock(mutex_);
  CheckThread("UnregisterHost");
  if (registered_.erase(static_cast<const std::byte*>(begin)) == 0) {
    Violation("memory was unregistered that was not registered");
  }
}

absl::Status FakeRuntime::Check(DeviceStream stream) {
  MutexLock lock(mutex_);
  return failure_;
}

void FakeRuntime::Run(DeviceStream stream, std::function<void()> kernel) {
  MutexLock lock(mutex_);
  Enqueue(stream, {nullptr, std::move(kernel)});
}

void FakeRuntime::RunWhen(DeviceStream stream, std::function<bool()> may_begin,
                          std::function<void()> kernel) {
  MutexLock lock(mutex_);
  Enqueue(stream, {std::move(may_begin), std::move(kernel)});
}

void FakeRuntime::LookAgain() {
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

DeviceStream FakeRuntime::stream(size_t index) {
  MutexLock lock(mutex_);
  return reinterpret_cast<DeviceStream>(streams_.at(index).get());
}

void FakeRuntime::Hold(DeviceStream stream) {
  MutexLock lock(mutex_);
  Of(stream).held = true;
}

void FakeRuntime::Release(DeviceStream stream) {
  MutexLock lock(mutex_);
  Of(stream).held = false;
  changed_.NotifyAll();
}

void FakeRuntime::LimitCopies(Call direction, std::optional<uint64_t> number) {
  MutexLock lock(mutex_);
  copies_left_.erase(direction);
  if (number.has_value()) copies_left_[direction] = *number;
  changed_.NotifyAll();
}

bool FakeRuntime::CanGoOn(const Stream& stream) {
  if (stream.held || stream.queue.empty()) return false;
  const auto& may_begin = stream.queue.front().may_begin;
  return may_begin == nullptr || may_begin();
}

void FakeRuntime::Settle() {
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, Now() + kTestPatience, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const auto& stream : streams_) {
      if (stream->busy || CanGoOn(*stream)) return false;
    }
    return true;
  });
}

uint64_t FakeRuntime::work_done() {
  MutexLock lock(mutex_);
  return work_done_;
}

void FakeRuntime::StreamLoop(Stream& stream) {
  while (true) {
    Work work;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || CanGoOn(stream);
      });
      if (stopping_) return;
      work = std::move(stream.queue.front());
      stream.queue.pop_front();
      stream.busy = true;
    }
    work.run();
    MutexLock lock(mutex_);
    stream.busy = false;
    ++work_done_;
    changed_.NotifyAll();
  }
}

void FakeRuntime::FailAt(Call call, uint32_t nth, absl::Status error) {
  MutexLock lock(mutex_);
  to_fail_[call][calls_[call] + nth] = std::move(error);
}

void FakeRuntime::FailDevice(absl::Status error) {
  MutexLock lock(mutex_);
  failure_ = std::move(error);
  for (const auto& stream : streams_) stream->queue.clear();
  changed_.NotifyAll();
}

std::vector<std::string> FakeRuntime::violations() {
  MutexLock lock(mutex_);
  return violations_;
}

size_t FakeRuntime::registered_ranges() {
  MutexLock lock(mutex_);
  return registered_.size();
}

uint64_t FakeRuntime::copied_bytes(Call direction) {
  MutexLock lock(mutex_);
  return copied_bytes_[direction];
}

uint64_t FakeRuntime::pageable_copies() {
  MutexLock lock(mutex_);
  return pageable_copies_;
}

}  // namespace thalweg
