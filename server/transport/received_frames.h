// ReceivedFrames counts the chunk frames that one end of a stream has received, and what of that it
// has told the other end, which keeps them until then.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thalweg {

// Acknowledgements ride on chunks that go the other way, as each contribution's result does.
// Letters have none: a frame of its own is due after so many of them, or so many of their bytes on
// all of a node's streams together. A shard counts letters until their receiver has acknowledged
// them, and must have room for these beside those on the way (kLetterBytesPerNode).
inline constexpr uint64_t kUntoldLetters = 128;
inline constexpr uint64_t kUntoldBytes = 2 << 20;

// A ReceivedFrames is not thread-safe.
class ReceivedFrames {
 public:
  void Add(size_t payload_bytes, bool is_letter) {
    ++count_;
    if (!is_letter) return;
    ++untold_letters_;
    untold_bytes_ += payload_bytes;
  }
  uint64_t count() const { return count_; }
  // Returns the count, which the other end is told now.
  uint64_t Tell() {
    untold_letters_ = untold_bytes_ = 0;
    return count_;
  }
  // Returns whether the other end has to be told, if the node has `num_streams`.
  bool IsDue(size_t num_streams) const {
    return untold_letters_ >= kUntoldLetters || untold_bytes_ * num_streams >= kUntoldBytes;
  }

 private:
  uint64_t count_ = 0;
  uint64_t untold_letters_ = 0;
  uint64_t untold_bytes_ = 0;
};

}  // namespace thalweg
