// SentFrames keeps the frames that one end of a stream has sent until the other end acknowledges
// them, so that they can be sent again when the stream has been opened again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"

namespace thalweg {

// A SentFrames is not thread-safe. Frames are numbered from 1 in the order of Add. It shares their
// bytes with gRPC and copies none.
class SentFrames {
 public:
  using Frames = std::deque<grpc::ByteBuffer>;

  // `counts`: see counted().
  void Add(const grpc::ByteBuffer& frame, bool counts = true);

  // Moves the first `count` frames ever added that are still kept to `released`, which the caller
  // destroys outside its locks. A smaller number than before changes nothing. Returns
  // InvalidArgument when that many frames have not been added.
  absl::Status Acknowledge(uint64_t count, Frames* released);

  // The frames that are not acknowledged, oldest first.
  const Frames& frames() const { return frames_; }
  // Returns how many of them count.
  size_t counted() const { return counted_; }
  // Moves all frames to the caller; the numbers go on.
  Frames Clear();

 private:
  uint64_t acknowledged_ = 0;
  Frames frames_;
  std::deque<bool> counts_;  // by frame
  size_t counted_ = 0;
};

}  // namespace thalweg
