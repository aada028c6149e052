// The round of a bucket: which workers have submitted it, which codecs it goes through, how far
// they are, and what it has taken.
//
//   gathering ──Submit by the last worker──▶ queued ──Begin──▶ running ──Finish──▶ gathering
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/ipc/message.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/part.h"

namespace thalweg {

// A round that is over.
struct FinishedRound {
  ipc::Complete message;  // without what JobCompression adds
  TimePoint first_submit;
  TimePoint ready_since;
  TimePoint end;
};

// Thread-compatible. A NodeBucket owns it and guards it with its mutex.
class BucketRound {
 public:
  BucketRound(BucketId id, uint32_t local_size) : id_(id), submitted_(local_size) {}

  // Takes a worker's submission of round `number`. Returns true when it was the last worker's: the
  // round is queued. InvalidArgument: out of order.
  absl::StatusOr<bool> Submit(uint32_t local_rank, uint64_t number, TimePoint now);
  // Requires a queued round. It will go through `codecs`, which are at rest, with gradients that
  // carry `loss_scale`.
  void Begin(std::vector<BucketCodec*> codecs, double loss_scale);
  const std::vector<BucketCodec*>& codecs() const { return codecs_; }
  // A chunk of a part has been encoded and is about to be sent.
  void NoteSent(BucketCodec& codec, Part& part, uint32_t chunk, uint64_t bytes, TimePoint now);
  // A result of a part in flight has been decoded. Returns true when it was the part's last.
  bool FinishChunk(BucketCodec& codec, Part& part, const RoundResult& received);
  // One of the codecs has its result, with `last`. Returns true when it was the last codec.
  bool FinishCodec(const Part& last);
  // Requires that all codecs have their results. Workers may submit the next round.
  FinishedRound Finish(TimePoint now);

  void AddReduceTime(Duration time) { reduce_time_ += time; }
  void AddWaitTime(Duration time) { wait_time_ += time; }
  void AddDecodeTime(Duration time) { decode_time_ += time; }

  uint64_t number() const { return number_; }        // of the round in flight, or the last one
  double loss_scale() const { return loss_scale_; }  // of the round that runs, or of the last one
  bool in_flight() const { return state_ != State::kGathering; }
  bool is_running() const { return state_ == State::kRunning; }
  TimePoint first_submit() const { return first_submit_; }
  TimePoint ready_since() const { return ready_since_; }
  uint32_t finished_chunks() const { return finished_chunks_; }  // of all parts
  // Local ranks that have not submitted, while others have; otherwise empty.
  std::vector<uint32_t> MissingWorkers() const;

 private:
  enum class State { kGathering, kQueued, kRunning };

  const BucketId id_;
  State state_ = State::kGathering;
  uint64_t number_ = 0;
  std::vector<bool> submitted_;  // by local rank
  uint32_t num_submitted_ = 0;
  TimePoint first_submit_;
  TimePoint ready_since_;
  std::vector<BucketCodec*> codecs_;  // that the round goes through
  double loss_scale_ = kUnknownLossScale;
  size_t codecs_left_ = 0;  // that have not got their results
  uint32_t finished_chunks_ = 0;
  uint32_t workers_ = 0;  // that the result is the mean over
  Duration reduce_time_{};
  Duration wait_time_{};
  Duration decode_time_{};
  std::optional<TimePoint> first_sent_;
};

}  // namespace thalweg
