// StateCalls asks a sidecar for what a job keeps from round to round, and gives it such a state:
// that of codecs, the weights that shards keep, and snapshots of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/base/mutex.h"
#include "core/base/update.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/message.h"

namespace thalweg {

// A StateCalls is thread-safe; calls take turns. A call waits for an answer until the sidecar has
// been silent for `timeout`: DeadlineExceeded, which begins with `who`.
class StateCalls {
 public:
  using Tell = std::function<absl::Status(const ipc::Message&, int fd)>;
  // `tell` sends to the sidecar.
  StateCalls(std::string who, Duration timeout, Tell tell)
      : who_(std::move(who)), timeout_(timeout), tell_(std::move(tell)) {}

  absl::StatusOr<BucketArena> GetCodecState();
  absl::Status SetCodecState(std::span<const std::byte> state);
  absl::StatusOr<SnapshotReport> Snapshots(const ipc::GetSnapshots& question);
  absl::StatusOr<WeightsSlice> GetWeights(BucketId bucket, uint32_t slice);
  absl::Status SetWeights(BucketId bucket, uint32_t slice, std::span<const float> values,
                          uint64_t steps);

  // These are for the thread that reads the sidecar's messages: one is here, be it an answer or
  // not; the session has failed, and so does every call from now on.
  void OnMessage() {
    MutexLock lock(mutex_);
    last_heard_ = Now();
  }
  absl::Status OnCodecState(const ipc::CodecState& message, UniqueFd fd);
  absl::Status OnWeights(const ipc::Weights& message, UniqueFd fd);
  absl::Status OnSnapshots(const ipc::Snapshots& message);
  absl::Status OnWeightsTaken(const ipc::WeightsTaken& message);
  void Fail(const absl::Status& why);
  // A sidecar's next process has to be asked for the codec's state again.
  bool awaits_codec_state() const {
    MutexLock lock(mutex_);
    return asked_ == Topic{ipc::Message(ipc::CodecState{}).index()};
  }

 private:
  // A Topic tells answers apart: which message it is, and what it is about.
  struct Topic {
    size_t message = 0;  // number among Message's alternatives
    BucketId bucket = {};
    uint32_t slice = 0;
    bool operator==(const Topic&) const = default;
  };
  struct Answer {
    uint64_t steps = 0;
    std::optional<BucketArena> arena;
    SnapshotReport snapshots = {};
  };

  // Sends the question and waits for the answer on that topic; `what` is for an error.
  absl::StatusOr<Answer> Ask(const ipc::Message& question, int fd, const Topic& topic,
                             const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  // Drops an answer that comes too late: nobody waits for it any more.
  void Take(const Topic& topic, Answer answer);

  const std::string who_;
  const Duration timeout_;
  const Tell tell_;

  Mutex turn_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::optional<Topic> asked_ ABSL_GUARDED_BY(mutex_);
  std::optional<Answer> answer_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  TimePoint last_heard_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
