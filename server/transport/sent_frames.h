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

  void Add(const grpc::ByteBuffer& frame) { frames_.push_back(frame); }

  // Moves the first `count` frames ever added that are still kept to `released`, which the caller
  // destroys outside its locks. A smaller number than before changes nothing. Returns
  // InvalidArgument when that many frames have not been added.
  absl::Status Acknowledge(uint64_t count, Frames* released);

  // The frames that are not acknowledged, oldest first.
  const Frames& frames() const { return frames_; }
  // Moves all frames to the caller; the numbers go on.
  Frames Clear();

 private:
  uint64_t acknowledged_ = 0;
  Frames frames_;
};

}  // namespace thalweg
