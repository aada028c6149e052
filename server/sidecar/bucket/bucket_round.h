// The round of a bucket: which workers have submitted it and what they say of it, which codecs it
// goes through, how far they are, and what it has taken.
//
//   gathering ──Submit by the last worker──▶ queued ──Begin──▶ running ──Finish──▶ gathering
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/base/mutex.h"
#include "core/base/update.h"
#include "core/exchange/rounds.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/message.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/part.h"

namespace thalweg {

// A round that is over.
struct FinishedRound {
  ipc::Complete message;  // without what JobCompression adds
  TimePoint first_submit;
  TimePoint ready_since;
  TimePoint end;
};

// Thread-safe. Its mutex guards the parts and the traffic of the bucket's codecs, too; it is never
// held while a device works.
class BucketRound {
 public:
  // `layout` and `result`, whose counter rises with the chunks that come back, must outlive it.
  BucketRound(BucketId id, const BucketLayout& layout, uint32_t local_size, BucketArena& result)
      : id_(id), layout_(layout), result_(result), submitted_(local_size) {}

  // Goes on after round `number` of an earlier process. Before the first round.
  void Restore(uint64_t number) {
    MutexLock lock(mutex_);
    number_ = number;
  }
  // Takes a worker's submission. Returns true when it was the last worker's: the round is queued.
  // InvalidArgument: out of order, there is no tensor that it says is unused, or other workers of
  // the node say something else of the round.
  absl::StatusOr<bool> Submit(uint32_t local_rank, const ipc::Submit& submission, TimePoint now);
  // Requires a queued round. It will go through `codecs`, which are at rest, with gradients that
  // carry `loss_scale`.
  void Begin(std::vector<BucketCodec*> codecs, double loss_scale);
  void BeginPart(Part& part);
  // A chunk of a part has been encoded and is about to be sent.
  void NoteSent(BucketCodec& codec, Part& part, uint32_t chunk, uint64_t bytes, Duration encoding,
                TimePoint now);
  // Claims the chunk of a result for decoding; returns when the chunk was sent. Errors as
  // Part::Claim.
  absl::StatusOr<TimePoint> Claim(Part& part, const RoundResult& received);
  // Takes the result of a claimed chunk that has squares (Part::gives_squares).
  absl::Status TakeSquares(const Part& part, const RoundResult& received);
  // The claimed chunk has been decoded. Returns true when it was the part's last.
  bool FinishChunk(BucketCodec& codec, Part& part, const RoundResult& received, Duration decoding);
  // One of the codecs has its result, with `last`. Returns true when it was the last codec.
  bool FinishCodec(const Part& last);
  // Requires that all codecs have their results. Workers may submit the next round.
  FinishedRound Finish(TimePoint now);

  // The node's link carries so many bytes for the round.
  void CountOnLink(uint64_t bytes) { link_bytes_ += bytes; }
  void AddReduceTime(Duration time);
  void AddWaitTime(Duration time);

  // These are of the round in flight, or of the last one; codecs() and what follows it, of the last
  // one that began.
  uint64_t number() const;
  bool in_flight() const;
  bool is_running() const;  // in flight, and begun
  std::vector<BucketCodec*> codecs() const;
  double loss_scale() const;
  uint64_t settings() const;
  UpdateRound kind() const;
  bool has_gradient() const { return kind() == UpdateRound::kPush; }  // from the workers
  // Which tensors took no part on any worker of the node, by number; empty: all took part.
  std::vector<bool> unused() const;

  // The struct says what the round waits for, and since when.
  struct Waiting {
    uint64_t round = 0;             // as number()
    std::vector<uint32_t> missing;  // local ranks that have not submitted the next round, while
                                    // others have
    TimePoint first_submit;
    bool is_running = false;
    TimePoint ready_since;
  };
  Waiting waiting() const;
  // Returns how many chunks of these parts, as far as they are in flight, are without a result, and
  // how many there are.
  std::pair<uint32_t, uint32_t> Outstanding(const std::vector<const Part*>& parts) const;

 private:
  enum class State { kGathering, kQueued, kRunning };
  // A Doing is what a round does.
  struct Doing {
    uint64_t settings = 0;
    UpdateRound kind = UpdateRound::kPush;
    bool operator==(const Doing&) const = default;
  };

  absl::Status CheckLocked(uint32_t local_rank, const ipc::Submit& submission) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool InFlightLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return state_ != State::kGathering;
  }

  const BucketId id_;
  const BucketLayout& layout_;
  BucketArena& result_;

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kGathering;
  uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;
  // These are of the round that gathers. They say who has submitted it, by local rank; how many
  // workers have said of each tensor that it is unused; and what they have said the round does.
  std::vector<bool> submitted_ ABSL_GUARDED_BY(mutex_);
  uint32_t num_submitted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> num_unused_ ABSL_GUARDED_BY(mutex_);
  std::optional<Doing> next_ ABSL_GUARDED_BY(mutex_);
  TimePoint first_submit_ ABSL_GUARDED_BY(mutex_);
  TimePoint ready_since_ ABSL_GUARDED_BY(mutex_);
  // These are of the round that runs, or of the last one.
  std::vector<BucketCodec*> codecs_ ABSL_GUARDED_BY(mutex_);
  double loss_scale_ ABSL_GUARDED_BY(mutex_) = kUnknownLossScale;
  std::vector<bool> unused_ ABSL_GUARDED_BY(mutex_);
  Doing now_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> squares_ ABSL_GUARDED_BY(mutex_);   // as in Complete
  size_t codecs_left_ ABSL_GUARDED_BY(mutex_) = 0;        // that have not got their results
  uint32_t finished_chunks_ ABSL_GUARDED_BY(mutex_) = 0;  // of all parts
  uint32_t workers_ ABSL_GUARDED_BY(mutex_) = 0;          // that the result is the mean over
  std::atomic<uint64_t> link_bytes_{0};
  Duration reduce_time_ ABSL_GUARDED_BY(mutex_){};
  Duration wait_time_ ABSL_GUARDED_BY(mutex_){};
  Duration decode_time_ ABSL_GUARDED_BY(mutex_){};
  std::optional<TimePoint> first_sent_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
