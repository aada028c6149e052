#include "core/ipc/bucket_arena.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

static_assert(std::endian::native == std::endian::little, "the header is written as it lies here");

constexpr char kArenaMagic[8] = {'T', 'H', 'W', 'G', 'A', 'R', 'E', 'N'};

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint64_t payload_bytes;
  alignas(64) uint32_t ready;
};
static_assert(offsetof(Header, version) == 8 && offsetof(Header, payload_bytes) == 16 &&
              offsetof(Header, ready) == 64);

// A chunk is copied in some tens of microseconds. A reader that keeps pace with the writer finds
// the next one ready within about this many pauses, and need not sleep.
constexpr int kSpins = 200;

constexpr size_t kMaxArenaName = 200;  // memfd_create takes 249

uint64_t FileBytes(uint64_t payload_bytes) {
  constexpr uint64_t kPage = kArenaHeaderBytes;
  return kArenaHeaderBytes + (payload_bytes + kPage - 1) / kPage * kPage;
}

absl::Status CheckPayloadBytes(uint64_t payload_bytes) {
  if (payload_bytes <= kMaxArenaPayloadBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("arena of ", payload_bytes,
                                                 " bytes asked for, at most ",
                                                 kMaxArenaPayloadBytes, " are possible"));
}

absl::Status SystemError(const std::string& what) {
  return absl::ResourceExhaustedError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// The word is only loaded through the const form, so a read-only mapping suffices.
std::atomic_ref<uint32_t> Ready(const std::byte* base) {
  auto* header = reinterpret_cast<Header*>(const_cast<std::byte*>(base));
  return std::atomic_ref<uint32_t>(header->ready);
}

const uint32_t* ReadyAddress(const std::byte* base) {
  return &reinterpret_cast<const Header*>(base)->ready;
}

// Sleeps while the word is `expected`, until `deadline` (an absolute time on the clock that
// steady_clock reads). May return early. FUTEX_PRIVATE_FLAG is not set because the waker is another
// process.
void FutexWait(const uint32_t* word, uint32_t expected, TimePoint deadline) {
  const int64_t nanos = ToNanos(deadline.time_since_epoch());
  const timespec until = {.tv_sec = static_cast<time_t>(nanos / 1'000'000'000),
                          .tv_nsec = static_cast<long>(nanos % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

absl::Status CheckFile(int fd, uint64_t payload_bytes) {
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena: descriptor is no memfd: ", std::strerror(errno)));
  }
  if ((seals & kNeeded) != kNeeded) {
    return absl::InvalidArgumentError(absl::StrCat("arena: seals ", seals, " do not include ",
                                                   kNeeded,
                                                   " (shrink, grow): its owner could cut it"));
  }
  struct stat info = {};
  if (fstat(fd, &info) != 0) return SystemError("arena: fstat");
  if (static_cast<uint64_t>(info.st_size) != FileBytes(payload_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("arena: file has ", info.st_size, " bytes, ",
                                                   FileBytes(payload_bytes), " expected for ",
                                                   payload_bytes, " bytes of payload"));
  }
  return absl::OkStatus();
}

absl::Status CheckHeader(const std::byte* base, uint64_t payload_bytes) {
  Header header;  // a copy, because the peer may still change the original
  std::memcpy(&header, base, sizeof header);
  if (std::memcmp(header.magic, kArenaMagic, sizeof kArenaMagic) != 0) {
    return absl::InvalidArgumentError("arena: magic is not THWGAREN");
  }
  if (header.version != kIpcVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena: ipc version ", header.version, ", expected ", kIpcVersion));
  }
  if (header.payload_bytes != payload_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("arena: header says ", header.payload_bytes,
                                                   " bytes of payload, expected ", payload_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BucketArena> BucketArena::Create(const std::string& name, uint64_t payload_bytes,
                                                bool peers_read_only) {
  THALWEG_RETURN_IF_ERROR(CheckPayloadBytes(payload_bytes));
  UniqueFd fd(memfd_create(name.substr(0, kMaxArenaName).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return SystemError("arena: memfd_create");
  const uint64_t file_bytes = FileBytes(payload_bytes);
  if (ftruncate(fd.get(), static_cast<off_t>(file_bytes)) != 0) {
    return SystemError(absl::StrCat("arena: ftruncate to ", file_bytes, " bytes"));
  }
  void* base = mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return SystemError(absl::StrCat("arena: mmap of ", file_bytes, " bytes"));
  const int fd_number = fd.get();
  BucketArena arena(std::move(fd), static_cast<std::byte*>(base), payload_bytes);
  Header header = {};
  std::memcpy(header.magic, kArenaMagic, sizeof kArenaMagic);
  header.version = kIpcVersion;
  header.payload_bytes = payload_bytes;
  std::memcpy(base, &header, sizeof header);
  // All seals are set at once and after the mapping: F_SEAL_SEAL forbids later seals,
  // F_SEAL_FUTURE_WRITE later mappings.
  const int seals =
      F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (peers_read_only ? F_SEAL_FUTURE_WRITE : 0);
  if (fcntl(fd_number, F_ADD_SEALS, seals) != 0) return SystemError("arena: F_ADD_SEALS");
  return arena;
}

absl::StatusOr<BucketArena> BucketArena::Open(UniqueFd fd, uint64_t payload_bytes) {
  THALWEG_RETURN_IF_ERROR(CheckPayloadBytes(payload_bytes));
  if (!fd.valid()) return absl::InvalidArgumentError("arena: no descriptor came with the message");
  THALWEG_RETURN_IF_ERROR(CheckFile(fd.get(), payload_bytes));
  const uint64_t file_bytes = FileBytes(payload_bytes);
  void* base = mmap(nullptr, file_bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return SystemError(absl::StrCat("arena: mmap of ", file_bytes, " bytes"));
  BucketArena arena(std::move(fd), static_cast<std::byte*>(base), payload_bytes);
  THALWEG_RETURN_IF_ERROR(CheckHeader(arena.base_, payload_bytes));
  return arena;
}

BucketArena::BucketArena(UniqueFd fd, std::byte* base, uint64_t payload_bytes)
    : fd_(std::move(fd)), base_(base), payload_bytes_(payload_bytes) {}

BucketArena::BucketArena(BucketArena&& other) noexcept
    : fd_(std::move(other.fd_)),
      base_(std::exchange(other.base_, nullptr)),
      payload_bytes_(std::exchange(other.payload_bytes_, 0)) {}

BucketArena& BucketArena::operator=(BucketArena&& other) noexcept {
  if (this != &other) {
    Unmap();
    fd_ = std::move(other.fd_);
    base_ = std::exchange(other.base_, nullptr);
    payload_bytes_ = std::exchange(other.payload_bytes_, 0);
  }
  return *this;
}

BucketArena::~BucketArena() { Unmap(); }

void BucketArena::Unmap() {
  if (base_ != nullptr) munmap(base_, FileBytes(payload_bytes_));
  base_ = nullptr;
}

// Relaxed suffices: the message that announces the round orders this before the readers' loads.
void BucketArena::ResetReady() { Ready(base_).store(0, std::memory_order_relaxed); }

void BucketArena::PublishReady(uint32_t chunks) {
  // The release pairs with the acquire in WaitReady, so that the payload is seen with the count.
  Ready(base_).store(chunks, std::memory_order_release);
  // It always wakes, because readers cannot write to the arena to say that they wait.
  syscall(SYS_futex, ReadyAddress(base_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t BucketArena::WaitReady(uint32_t chunks, TimePoint deadline) const {
  for (;;) {
    uint32_t ready = 0;
    for (int spin = 0; spin < kSpins; ++spin) {
      ready = Ready(base_).load(std::memory_order_acquire);
      if (ready >= chunks) return ready;
      Pause();
    }
    if (Now() >= deadline) return ready;
    FutexWait(ReadyAddress(base_), ready, deadline);
  }
}

}  // namespace thalweg
