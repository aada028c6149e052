#include "server/sidecar/bucket/bucket_round.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/codec/dense.h"

namespace thalweg {

absl::Status BucketRound::CheckLocked(uint32_t local_rank, const ipc::Submit& submission) const {
  const auto refused = [this](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id_), what...));
  };
  if (InFlightLocked() || submission.round != number_ + 1 || submitted_[local_rank]) {
    return refused(": round ", submission.round, " was submitted, but round ", number_,
                   InFlightLocked() ? " is in flight" : " was the last");
  }
  for (const uint32_t tensor : submission.unused) {
    if (tensor < layout_.tensors.size()) continue;
    return refused(": tensor ", tensor, " is unused, but there are ", layout_.tensors.size());
  }
  if (next_ && *next_ != Doing{submission.settings, submission.kind}) {
    return refused(
        ": workers of this node submitted it with settings ", next_->settings, " and ",
        submission.settings,
        " (whose number rises where a learning rate or the like changes, and where a worker "
        "finishes earlier than another one)");
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> BucketRound::Submit(uint32_t local_rank, const ipc::Submit& submission,
                                         TimePoint now) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(CheckLocked(local_rank, submission));
  if (num_submitted_ == 0) first_submit_ = now;
  if (!submission.unused.empty()) num_unused_.resize(layout_.tensors.size());
  for (const uint32_t tensor : submission.unused) ++num_unused_[tensor];
  next_ = {submission.settings, submission.kind};
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
  MutexLock lock(mutex_);
  state_ = State::kRunning;
  codecs_ = std::move(codecs);
  codecs_left_ = codecs_.size();
  loss_scale_ = loss_scale;
  unused_.assign(num_unused_.size(), false);
  for (size_t i = 0; i < unused_.size(); ++i) unused_[i] = num_unused_[i] == submitted_.size();
  num_unused_.clear();
  now_ = next_.value_or(Doing());
  next_.reset();
  squares_.clear();
  for (BucketCodec* codec : codecs_) codec->traffic = {};
}

void BucketRound::BeginPart(Part& part) {
  MutexLock lock(mutex_);
  part.BeginRound(now_.kind);
  if (part.gives_squares()) {
    squares_.assign(part.NumSquares() * GranulesIn(layout_, 0, layout_.Elems()), 0);
  }
}

void BucketRound::NoteSent(BucketCodec& codec, Part& part, uint32_t chunk, uint64_t bytes,
                           Duration encoding, TimePoint now) {
  MutexLock lock(mutex_);
  reduce_time_ += encoding;
  codec.traffic.sent += bytes;
  if (!first_sent_) first_sent_ = now;
  part.sent[chunk] = now;
}

absl::StatusOr<TimePoint> BucketRound::Claim(Part& part, const RoundResult& received) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(part.Claim(received));
  return part.sent[received.id.chunk];
}

absl::Status BucketRound::TakeSquares(const Part& part, const RoundResult& received) {
  const uint64_t first = GranulesIn(layout_, 0, part.plan.Begin(received.id.chunk));
  const uint64_t count = received.elems / part.NumSquares();
  std::vector<double> squares(received.elems);
  THALWEG_RETURN_IF_ERROR(DecodePayload(received.payload, DType::kFloat64, DType::kFloat64,
                                        received.elems, squares.data()));
  MutexLock lock(mutex_);
  const uint64_t of_bucket = squares_.size() / part.NumSquares();
  for (uint64_t i = 0; i < squares.size(); ++i) {
    squares_[i / count * of_bucket + first + i % count] = squares[i];
  }
  return absl::OkStatus();
}

bool BucketRound::FinishChunk(BucketCodec& codec, Part& part, const RoundResult& received,
                              Duration decoding) {
  MutexLock lock(mutex_);
  decode_time_ += decoding;
  codec.traffic.received += received.payload.SizeBytes();
  // Whoever waits for the result takes its counter for a sign of life.
  result_.PublishReady(++finished_chunks_);
  return part.FinishChunk(received);
}

bool BucketRound::FinishCodec(const Part& last) {
  MutexLock lock(mutex_);
  workers_ = last.workers;
  return --codecs_left_ == 0;
}

FinishedRound BucketRound::Finish(TimePoint now) {
  MutexLock lock(mutex_);
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
  message.link_bytes_sent = link_bytes_.exchange(0);
  const Duration wire_time = first_sent_ ? now - *first_sent_ : Duration::zero();
  message.reduce_ns = static_cast<uint64_t>(ToNanos(reduce_time_));
  message.wait_ns = static_cast<uint64_t>(ToNanos(wait_time_));
  message.wire_ns = static_cast<uint64_t>(ToNanos(wire_time));
  message.decode_ns = static_cast<uint64_t>(ToNanos(decode_time_));
  message.squares = std::exchange(squares_, {});
  state_ = State::kGathering;
  num_submitted_ = 0;
  submitted_.assign(submitted_.size(), false);
  return finished;
}

void BucketRound::AddReduceTime(Duration time) {
  MutexLock lock(mutex_);
  reduce_time_ += time;
}

void BucketRound::AddWaitTime(Duration time) {
  MutexLock lock(mutex_);
  wait_time_ += time;
}

uint64_t BucketRound::number() const {
  MutexLock lock(mutex_);
  return number_;
}

bool BucketRound::in_flight() const {
  MutexLock lock(mutex_);
  return InFlightLocked();
}

bool BucketRound::is_running() const {
  MutexLock lock(mutex_);
  return state_ == State::kRunning;
}

std::vector<BucketCodec*> BucketRound::codecs() const {
  MutexLock lock(mutex_);
  return codecs_;
}

double BucketRound::loss_scale() const {
  MutexLock lock(mutex_);
  return loss_scale_;
}

uint64_t BucketRound::settings() const {
  MutexLock lock(mutex_);
  return now_.settings;
}

UpdateRound BucketRound::kind() const {
  MutexLock lock(mutex_);
  return now_.kind;
}

std::vector<bool> BucketRound::unused() const {
  MutexLock lock(mutex_);
  return unused_;
}

BucketRound::Waiting BucketRound::waiting() const {
  MutexLock lock(mutex_);
  Waiting waiting{number_, {}, first_submit_, state_ == State::kRunning, ready_since_};
  if (InFlightLocked() || num_submitted_ == 0) return waiting;
  for (uint32_t rank = 0; rank < submitted_.size(); ++rank) {
    if (!submitted_[rank]) waiting.missing.push_back(rank);
  }
  return waiting;
}

std::pair<uint32_t, uint32_t> BucketRound::Outstanding(
    const std::vector<const Part*>& parts) const {
  MutexLock lock(mutex_);
  uint32_t missing = 0;
  uint32_t chunks = 0;
  for (const Part* part : parts) {
    if (!part->in_flight) continue;
    missing += part->plan.Count() - part->finished_chunks;
    chunks += part->plan.Count();
  }
  return {missing, chunks};
}

}  // namespace thalweg
