#include "server/transport/sent_frames.h"

#include "absl/strings/str_cat.h"

namespace thalweg {

void SentFrames::Add(const grpc::ByteBuffer& frame, bool counts) {
  frames_.push_back(frame);
  counts_.push_back(counts);
  if (counts) ++counted_;
}

absl::Status SentFrames::Acknowledge(uint64_t count, Frames* released) {
  const uint64_t added = acknowledged_ + frames_.size();
  if (count > added) {
    return absl::InvalidArgumentError(
        absl::StrCat("the peer acknowledges ", count, " frames, expected ", added, " at most"));
  }
  for (; acknowledged_ < count; ++acknowledged_) {
    // Moving a grpc::ByteBuffer would copy it.
    released->emplace_back().Swap(&frames_.front());
    frames_.pop_front();
    if (counts_.front()) --counted_;
    counts_.pop_front();
  }
  return absl::OkStatus();
}

SentFrames::Frames SentFrames::Clear() {
  Frames frames;
  frames.swap(frames_);
  acknowledged_ += frames.size();
  counts_.clear();
  counted_ = 0;
  return frames;
}

}  // namespace thalweg
