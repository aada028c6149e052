// FakeRuntime is a device for tests: streams are threads, which the test can hold; the host cannot
// touch device memory; what CUDA leaves undefined is recorded as a violation.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// It is thread-safe. Destroy it when nothing calls it any more; work that is still queued is
// dropped.
class FakeRuntime : public DeviceRuntime {
 public:
  enum class Call {
    kBindThread,
    kCreateStream,
    kCreateEvent,
    kRecord,
    kWait,
    kAllocate,
    kShare,
    kOpen,
    kCopy,
    kCopyToHost,
    kCopyToDevice,
    kLaunch,
    kRegisterHost,
  };

  explicit FakeRuntime(bool registers_read_only = true, int number = 0);
  ~FakeRuntime() override;

  std::string uuid() const override { return std::string(16, static_cast<char>(number_)); }
  int number() const override { return number_; }
  absl::Status BindThread() override;
  absl::StatusOr<DeviceStream> CreateStream() override;
  void DestroyStream(DeviceStream stream) override;
  absl::StatusOr<DeviceEvent> CreateEvent() override;
  void DestroyEvent(DeviceEvent event) override;
  absl::Status Record(DeviceEvent event, DeviceStream stream) override;
  absl::Status Wait(DeviceStream stream, DeviceEvent event) override;
  absl::StatusOr<void*> AllocateMemory(size_t bytes) override;
  void FreeMemory(void* memory) override;
  absl::StatusOr<void*> AllocateHost(size_t bytes) override;
  void FreeHost(void* memory) override;
  absl::StatusOr<std::string> ShareMemory(void* memory) override;
  absl::StatusOr<void*> OpenMemory(const std::string& shared) override;
  void CloseMemory(void* memory) override;
  absl::StatusOr<DeviceEvent> CreateSharedEvent() override { return CreateEvent(); }
  absl::StatusOr<std::string> ShareEvent(DeviceEvent event) override;
  absl::StatusOr<DeviceEvent> OpenEvent(const std::string& shared) override;
  absl::Status Copy(void* to, const void* from, size_t bytes, DeviceStream stream) override;
  absl::Status CopyToHost(void* host, const void* device, size_t bytes,
                          DeviceStream stream) override;
  absl::Status CopyToDevice(void* device, const void* host, size_t bytes,
                            DeviceStream stream) override;
  absl::Status Launch(DeviceStream stream, void (*function)(void*), void* argument) override;
  absl::Status RegisterHost(const void* begin, size_t bytes, Access access) override;
  void UnregisterHost(const void* begin) override;
  absl::Status Check(DeviceStream stream) override;

  // Returns whether the device is the calling thread's current one.
  bool IsBound() const;

  // Allocates zeroed device memory: an address that faults when the host uses it.
  std::span<std::byte> Allocate(size_t bytes);
  // Frees as cudaFree does, but without its wait: a later copy is a violation.
  void Free(std::span<std::byte> memory);
  // The process that has allocated the memory ends: it is freed when nobody has it open.
  void Abandon(void* memory);
  // From now on memory may be freed that another process has open, which otherwise is a violation.
  void AllowFreeingOpenMemory();
  // Returns the same memory as kernels see it, to be used within Run.
  std::span<std::byte> Inside(std::span<std::byte> memory);
  // Queues a "kernel".
  void Run(DeviceStream stream, std::function<void()> kernel);
  // Queues a kernel that begins when `may_begin` returns true, which must not call the runtime; it
  // is evaluated whenever a stream of this device has made progress, and by LookAgain.
  void RunWhen(DeviceStream stream, std::function<bool()> may_begin, std::function<void()> kernel);
  void LookAgain();
  // Queues a kernel that uses device memory by its addresses, as a real one does. While it runs,
  // the host could access them too.
  void RunInPlace(DeviceStream stream, std::function<void()> kernel);

  // Returns a stream by order of creation; destroyed ones count.
  DeviceStream stream(size_t index);
  // Hold keeps a stream from beginning new work until Release.
  void Hold(DeviceStream stream);
  void Release(DeviceStream stream);
  // Lets `number` more copies in that direction begin, on all streams together; the others wait for
  // the next such call. Null lets all begin.
  void LimitCopies(Call direction, std::optional<uint64_t> number);
  // Waits until no stream that is not held can make progress.
  void Settle();
  // Returns how much work has been done on all streams.
  uint64_t work_done();

  // Makes the `nth` (from 1) future call of that kind return `error`, once.
  void FailAt(Call call, uint32_t nth, absl::Status error);
  // Drops everything queued and makes every call return `error` from now on.
  void FailDevice(absl::Status error);

  std::vector<std::string> violations();
  size_t registered_ranges();
  uint64_t copied_bytes(Call direction);
  // Return the numbers of pieces of device memory that have not been freed, and that are open.
  size_t allocated();
  size_t opened();
  // Returns the number of copies from or to unregistered memory, for which the caller had to wait.
  uint64_t pageable_copies();

 private:
  static constexpr size_t kPage = 4096;
  struct Stream;
  struct Event {
    uint64_t recorded = 0;
    uint64_t reached = 0;
    bool destroyed = false;
    Event* shared = nullptr;  // the event that this one was opened from
  };
  struct Memory {
    size_t bytes = 0;
    std::byte* inside = nullptr;  // null once freed
    uint32_t opened = 0;          // number of openers
    bool abandoned = false;
  };
  struct Registered {
    size_t bytes = 0;
    Access access = Access::kReadWrite;
  };
  struct Work {
    std::function<bool()> may_begin;  // called with mutex_ held; always true when null
    std::function<void()> run;
  };

  void CheckThread(const char* call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Enter(Call call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enqueue(DeviceStream stream, Work work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CopyHost(Call direction, std::byte* host, std::byte* device, size_t bytes,
                        DeviceStream stream);
  bool MayCopy(Call direction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DoCopy(Call direction, std::byte* host, std::byte* device, size_t bytes, bool registered);
  // Returns the address of those bytes as kernels see them, or null when they are not all in one
  // piece of memory.
  std::byte* InsideLocked(const std::byte* device, size_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Registered* FindRegistered(const std::byte* host, size_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Stream& Of(DeviceStream stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CanGoOn(const Stream& stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Violation(std::string what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StreamLoop(Stream& stream);
  void ProtectLocked(int protection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int number_;
  const bool registers_read_only_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Stream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Event>> events_ ABSL_GUARDED_BY(mutex_);
  std::map<const std::byte*, Memory> memory_ ABSL_GUARDED_BY(mutex_);
  std::map<const std::byte*, Registered> registered_ ABSL_GUARDED_BY(mutex_);
  std::map<Call, std::map<uint32_t, absl::Status>> to_fail_ ABSL_GUARDED_BY(mutex_);
  std::map<Call, uint32_t> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<Call, uint64_t> copied_bytes_ ABSL_GUARDED_BY(mutex_);
  std::map<Call, uint64_t> copies_left_ ABSL_GUARDED_BY(mutex_);  // of the limited directions
  bool frees_open_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t work_done_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t running_in_place_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t pageable_copies_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::string> violations_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
