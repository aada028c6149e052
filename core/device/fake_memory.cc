// This file holds the memory of a FakeRuntime and what is shared of it.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/status_macros.h"
#include "core/device/fake_runtime.h"

namespace thalweg {

absl::StatusOr<void*> FakeRuntime::AllocateMemory(size_t bytes) {
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(Enter(Call::kAllocate));
  }
  return static_cast<void*>(Allocate(bytes).data());
}

void FakeRuntime::FreeMemory(void* memory) { Free({static_cast<std::byte*>(memory), 0}); }

absl::StatusOr<void*> FakeRuntime::AllocateHost(size_t bytes) {
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  void* const memory = std::aligned_alloc(kPage, whole);
  THALWEG_RETURN_IF_ERROR(RegisterHost(memory, whole, Access::kReadWrite));
  return memory;
}

void FakeRuntime::FreeHost(void* memory) {
  UnregisterHost(memory);
  std::free(memory);
}

absl::StatusOr<std::string> FakeRuntime::ShareMemory(void* memory) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kShare));
  const auto found = memory_.find(static_cast<const std::byte*>(memory));
  if (found == memory_.end() || found->second.bytes % kSharedMemoryGranule != 0) {
    Violation("memory was shared that is not whole granules");
  }
  return absl::StrCat("memory ", reinterpret_cast<uintptr_t>(memory));
}

absl::StatusOr<void*> FakeRuntime::OpenMemory(const std::string& shared) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kOpen));
  uintptr_t address = 0;
  absl::string_view text = shared;
  if (!absl::ConsumePrefix(&text, "memory ") || !absl::SimpleAtoi(text, &address)) {
    return absl::InvalidArgumentError("fake: that is not shared memory");
  }
  const auto found = memory_.find(reinterpret_cast<const std::byte*>(address));
  if (found == memory_.end() || found->second.inside == nullptr) {
    return absl::InvalidArgumentError("fake: that is not memory of this device");
  }
  ++found->second.opened;
  return reinterpret_cast<void*>(address);
}

void FakeRuntime::CloseMemory(void* memory) {
  MutexLock lock(mutex_);
  Memory& found = memory_.at(static_cast<const std::byte*>(memory));
  if (found.opened == 0) return Violation("memory was closed that was not open");
  if (--found.opened == 0 && found.abandoned) {
    munmap(std::exchange(found.inside, nullptr), found.bytes);
  }
}

void FakeRuntime::Abandon(void* memory) {
  {
    MutexLock lock(mutex_);
    Memory& found = memory_.at(static_cast<const std::byte*>(memory));
    found.abandoned = true;
    if (found.opened > 0) return;
  }
  FreeMemory(memory);
}

void FakeRuntime::AllowFreeingOpenMemory() {
  MutexLock lock(mutex_);
  frees_open_ = true;
}

absl::StatusOr<std::string> FakeRuntime::ShareEvent(DeviceEvent event) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kShare));
  return absl::StrCat("event ", reinterpret_cast<uintptr_t>(event));
}

absl::StatusOr<DeviceEvent> FakeRuntime::OpenEvent(const std::string& shared) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(Enter(Call::kOpen));
  uintptr_t number = 0;
  absl::string_view text = shared;
  if (!absl::ConsumePrefix(&text, "event ") || !absl::SimpleAtoi(text, &number)) {
    return absl::InvalidArgumentError("fake: that is not a shared event");
  }
  // The opened event is a separate one, as in another process; it is reached when the shared one
  // is.
  auto opened = std::make_unique<Event>();
  opened->shared = reinterpret_cast<Event*>(number);
  events_.push_back(std::move(opened));
  return reinterpret_cast<DeviceEvent>(events_.back().get());
}

std::span<std::byte> FakeRuntime::Allocate(size_t bytes) {
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  const int fd = memfd_create("fake-device", MFD_CLOEXEC);
  void* address = MAP_FAILED;
  void* inside = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(whole)) == 0) {
    address = mmap(nullptr, whole, PROT_NONE, MAP_SHARED, fd, 0);
    inside = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (address == MAP_FAILED || inside == MAP_FAILED) std::abort();
  close(fd);
  std::memset(inside, 0xff, bytes);  // NaNs: a device's memory begins with anything, too
  MutexLock lock(mutex_);
  memory_[static_cast<std::byte*>(address)] = {whole, static_cast<std::byte*>(inside)};
  // Memory allocated now stays accessible for in-place kernels that begin before the running one
  // ends.
  if (running_in_place_ > 0) mprotect(address, whole, PROT_READ | PROT_WRITE);
  return {static_cast<std::byte*>(address), bytes};
}

void FakeRuntime::Free(std::span<std::byte> memory) {
  MutexLock lock(mutex_);
  Memory& found = memory_.at(memory.data());
  if (found.inside == nullptr) return Violation("memory was freed twice");
  if (found.opened > 0 && !frees_open_) {
    Violation("memory was freed that another process had open");
  }
  munmap(std::exchange(found.inside, nullptr), found.bytes);
  mprotect(memory.data(), found.bytes, PROT_NONE);  // the address stays reserved
}

std::span<std::byte> FakeRuntime::Inside(std::span<std::byte> memory) {
  MutexLock lock(mutex_);
  return {InsideLocked(memory.data(), memory.size()), memory.size()};
}

std::byte* FakeRuntime::InsideLocked(const std::byte* device, size_t bytes) {
  auto found = memory_.upper_bound(device);
  if (found == memory_.begin()) return nullptr;
  --found;
  const auto offset = static_cast<size_t>(device - found->first);
  const Memory& memory = found->second;
  if (memory.inside == nullptr || offset + bytes > memory.bytes) return nullptr;
  return memory.inside + offset;
}

const FakeRuntime::Registered* FakeRuntime::FindRegistered(const std::byte* host, size_t bytes) {
  auto found = registered_.upper_bound(host);
  if (found == registered_.begin()) return nullptr;
  --found;
  const auto offset = static_cast<size_t>(host - found->first);
  return offset + bytes <= found->second.bytes ? &found->second : nullptr;
}

void FakeRuntime::RunInPlace(DeviceStream stream, std::function<void()> kernel) {
  Run(stream, [this, kernel = std::move(kernel)] {
    {
      MutexLock lock(mutex_);
      if (running_in_place_++ == 0) ProtectLocked(PROT_READ | PROT_WRITE);
    }
    kernel();
    MutexLock lock(mutex_);
    if (--running_in_place_ == 0) ProtectLocked(PROT_NONE);
  });
}

void FakeRuntime::ProtectLocked(int protection) {
  for (const auto& [address, memory] : memory_) {
    if (memory.inside == nullptr) continue;
    mprotect(const_cast<std::byte*>(address), memory.bytes, protection);
  }
}

size_t FakeRuntime::allocated() {
  MutexLock lock(mutex_);
  return static_cast<size_t>(std::count_if(memory_.begin(), memory_.end(), [](const auto& entry) {
    return entry.second.inside != nullptr;
  }));
}

size_t FakeRuntime::opened() {
  MutexLock lock(mutex_);
  size_t opened = 0;
  for (const auto& [address, memory] : memory_) opened += memory.opened;
  return opened;
}

}  // namespace thalweg
