// Memory of one bucket that two processes share: one writes it, the others read it.
//
// An arena is a memfd, passed over a Connection, of kArenaHeaderBytes + payload rounded up to whole
// pages:
//
//   byte  size  field
//   0     8   A magic          "THWGAREN"
//   8     4   B ipc version    kIpcVersion
//   12    4   C reserved       0
//   16    8   D payload_bytes  as announced, before rounding
//   24    40  - reserved       0, so that E has a cache line of its own
//   64    4   E ready          chunks that the writer has completed in the current round; a futex
//   68        - reserved       0, up to the end of the header page
//   4096      F payload        D bytes, then 0 up to the end of the last page
//
// Integers are little-endian. The file is sealed against shrinking, growing and further sealing, so
// that a reader never meets a page that is gone (SIGBUS); with `peers_read_only` also against new
// writable mappings, so that only the creator's mapping can change it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/ipc/unique_fd.h"

namespace thalweg {

inline constexpr uint64_t kArenaHeaderBytes = 4096;
inline constexpr uint64_t kMaxArenaPayloadBytes = uint64_t{1} << 46;

// Move-only. Thread-compatible, except that ResetReady/PublishReady (one writing thread) and
// WaitReady (any number of readers, in any process) may run at the same time.
class BucketArena {
 public:
  // The writer's end: a new arena of zeros. `name` (cut to 200 bytes) appears in
  // /proc/<pid>/maps. Errors: InvalidArgument
  // (payload_bytes > kMaxArenaPayloadBytes), ResourceExhausted (no memory or descriptor left).
  static absl::StatusOr<BucketArena> Create(const std::string& name, uint64_t payload_bytes,
                                            bool peers_read_only);

  // A reader's end of a peer's arena, which must hold exactly `payload_bytes`. Nothing about `fd`
  // is believed: InvalidArgument says what is wrong with it.
  static absl::StatusOr<BucketArena> Open(UniqueFd fd, uint64_t payload_bytes);

  BucketArena(BucketArena&& other) noexcept;
  BucketArena& operator=(BucketArena&& other) noexcept;
  ~BucketArena();  // unmaps and closes; the memory lives until the last process has done so

  // Page aligned. The mutable form requires an arena made by Create: an opened one is mapped
  // read-only.
  std::byte* payload() { return base_ + kArenaHeaderBytes; }
  const std::byte* payload() const { return base_ + kArenaHeaderBytes; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  // What to pass to Connection::Send; remains owned by the arena.
  int fd() const { return fd_.get(); }

  // Writer: begins a round. To be called before the round is announced, else a reader may take the
  // previous round's chunks for this one's.
  void ResetReady();

  // Writer: the first `chunks` chunks are complete. Everything written to the payload before is
  // visible to a reader that has seen this count.
  void PublishReady(uint32_t chunks);

  // Reader: waits until at least `chunks` chunks are ready or `deadline` passes; returns the count
  // seen last, which is below `chunks` only when the deadline has passed. The count is the peer's
  // word: check it against the chunk plan before using it as an index.
  uint32_t WaitReady(uint32_t chunks, TimePoint deadline) const;

 private:
  BucketArena(UniqueFd fd, std::byte* base, uint64_t payload_bytes);
  void Unmap();

  UniqueFd fd_;
  std::byte* base_ = nullptr;
  uint64_t payload_bytes_ = 0;
};

}  // namespace thalweg
