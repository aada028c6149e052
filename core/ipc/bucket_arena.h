// BucketArena is the memory of one bucket that two processes share: one writes it, the others read
// it.
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
// that a reader never accesses a page that is gone (SIGBUS). With `peers_read_only` it is also
// sealed against new writable mappings, so that only the creator's mapping can change it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/unique_fd.h"

namespace thalweg {

inline constexpr uint64_t kArenaHeaderBytes = 4096;
inline constexpr uint64_t kMaxArenaPayloadBytes = uint64_t{1} << 46;
// Arenas that are used again and again are given up after so long without use.
inline constexpr Duration kArenaIdleTime = std::chrono::minutes(1);

// A BucketArena is move-only and thread-compatible, except that ResetReady/PublishReady (one
// writing thread) and WaitReady (any number of readers, in any process) may run at the same time.
class BucketArena {
 public:
  // Makes a new arena of zeros for the writer. `name` (truncated to 200 bytes) appears in
  // /proc/<pid>/maps. Errors: InvalidArgument (payload_bytes > kMaxArenaPayloadBytes),
  // ResourceExhausted (no memory or descriptor left).
  static absl::StatusOr<BucketArena> Create(const std::string& name, uint64_t payload_bytes,
                                            bool peers_read_only);

  // Opens a peer's arena for reading; it must hold exactly `payload_bytes`. `fd` is not trusted:
  // InvalidArgument says what is wrong with it.
  static absl::StatusOr<BucketArena> Open(UniqueFd fd, uint64_t payload_bytes);

  BucketArena(BucketArena&& other) noexcept;
  BucketArena& operator=(BucketArena&& other) noexcept;
  ~BucketArena();  // unmaps and closes; the memory lives until the last process has done so

  // Returns the payload, page aligned. The mutable form requires an arena made by Create: an opened
  // one is mapped read-only.
  std::byte* payload() { return base_ + kArenaHeaderBytes; }
  const std::byte* payload() const { return base_ + kArenaHeaderBytes; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  // Returns the descriptor for Connection::Send; the arena keeps ownership.
  int fd() const { return fd_.get(); }
  // Closes the descriptor, which is not to be sent any more; the memory stays.
  void CloseFd() { fd_ = UniqueFd(); }

  // Begins a round (writer). Must be called before the round is announced; otherwise a reader may
  // take the previous round's chunks for this one's.
  void ResetReady();

  // Publishes that the first `chunks` chunks are complete (writer). A reader that has seen this
  // count sees everything written to the payload before.
  void PublishReady(uint32_t chunks);

  // Waits until at least `chunks` chunks are ready or `deadline` passes (reader); returns the last
  // count, which is below `chunks` only when the deadline has passed. The count comes from the
  // peer: check it against the chunk plan before using it as an index.
  uint32_t WaitReady(uint32_t chunks, TimePoint deadline) const;

 private:
  BucketArena(UniqueFd fd, std::byte* base, uint64_t payload_bytes);
  void Unmap();

  UniqueFd fd_;
  std::byte* base_ = nullptr;
  uint64_t payload_bytes_ = 0;
};

}  // namespace thalweg
