#include "server/sidecar/bucket_round.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {

absl::StatusOr<bool> BucketRound::Submit(uint32_t local_rank, uint64_t number, TimePoint now) {
  if (in_flight() || number != number_ + 1 || submitted_[local_rank]) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id_), ": round ", number, " was submitted, but round ",
                     number_, in_flight() ? " is in flight" : " was the last"));
  }
  if (num_submitted_ == 0) first_submit_ = now;
  submitted_[local_rank] = true;
  if (++num_submitted_ < submitted_.size()) return false;

  ++number_;
  state_ = State::kQueued;
  ready_since_ = now;
  finished_chunks_ = 0;
  workers_ = 0;
  reduce_time_ = Duration::zero();
  wait_time_ = now - first_submit_;
  decode_time_ = Duration::zero();
  first_sent_.reset();
  return true;
}

void BucketRound::Begin(std::vector<BucketCodec*> codecs, double loss_scale) {
  state_ = State::kRunning;
  codecs_ = std::move(codecs);
  codecs_left_ = codecs_.size();
  loss_scale_ = loss_scale;
  for (BucketCodec* codec : codecs_) codec->traffic = {};
}

void BucketRound::NoteSent(BucketCodec& codec, Part& part, uint32_t chunk, uint64_t bytes,
                           TimePoint now) {
  codec.traffic.sent += bytes;
  if (!first_sent_) first_sent_ = now;
  part.sent[chunk] = now;
}

bool BucketRound::FinishChunk(BucketCodec& codec, Part& part, const RoundResult& received) {
  codec.traffic.received += received.payload.SizeBytes();
  ++finished_chunks_;
  return part.FinishChunk(received);
}

bool BucketRound::FinishCodec(const Part& last) {
  workers_ = last.workers;
  return --codecs_left_ == 0;
}

FinishedRound BucketRound::Finish(TimePoint now) {
  FinishedRound finished{{}, first_submit_, ready_since_, now};
  ipc::Complete& message = finished.message;
  message.id = id_;
  message.round = number_;
  message.workers = workers_;
  for (const BucketCodec* codec : codecs_) {
    message.nonfinite_elems += codec->nonfinite_elems();
    message.wire_bytes_sent += codec->traffic.sent;
    message.wire_bytes_received += codec->traffic.received;
  }
  const Duration wire_time = first_sent_ ? now - *first_sent_ : Duration::zero();
  message.reduce_ns = static_cast<uint64_t>(ToNanos(reduce_time_));
  message.wait_ns = static_cast<uint64_t>(ToNanos(wait_time_));
  message.wire_ns = static_cast<uint64_t>(ToNanos(wire_time));
  message.decode_ns = static_cast<uint64_t>(ToNanos(decode_time_));
  state_ = State::kGathering;
  num_submitted_ = 0;
  submitted_.assign(submitted_.size(), false);
  return finished;
}

std::vector<uint32_t> BucketRound::MissingWorkers() const {
  std::vector<uint32_t> missing;
  if (in_flight() || num_submitted_ == 0) return missing;
  for (uint32_t rank = 0; rank < submitted_.size(); ++rank) {
    if (!submitted_[rank]) missing.push_back(rank);
  }
  return missing;
}

}  // namespace thalweg
