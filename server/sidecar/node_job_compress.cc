// How a NodeJob takes a compressed bucket through its round: see BucketCodec for the steps.

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/arena_gradient.h"
#include "server/sidecar/node_job.h"
#include "server/sidecar/shard_residuals.h"

namespace thalweg {

absl::Status NodeJob::BeginCompressed(NodeBucket& bucket) {
  ArenaGradient gradient(*this, bucket);
  for (const auto& codec : bucket.codecs) {
    const TimePoint start = Now();
    THALWEG_ASSIGN_OR_RETURN(Part* const part, codec->Begin(pool_, gradient));
    const TimePoint end = Now();
    if (trace_) trace_.Work("compress", start, end, Describe(bucket, *codec));
    {
      MutexLock lock(mutex_);
      bucket.reduce_time += end - start;
      part->BeginRound();
      if (!codec->EndsWith(*part)) {
        first_sent_.push_back({bucket.shared_from_this(), codec.get(), part});
      }
    }
    THALWEG_RETURN_IF_ERROR(SendPart(bucket, *codec, *part, pool_));
  }
  return absl::OkStatus();
}

void NodeJob::FinishLoop() {
  absl::Status status;
  while (status.ok()) {
    Step step;
    {
      MutexLock lock(mutex_);
      const auto first_is_here = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !first_sent_.empty() && !first_sent_.front().part->in_flight;
      };
      const auto later_here = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return std::find_if(later_sent_.begin(), later_sent_.end(),
                            [](const Step& s) { return !s.part->in_flight; });
      };
      finish_changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return first_is_here() || later_here() != later_sent_.end() || !StoppedLocked().ok();
      });
      if (!StoppedLocked().ok()) return;
      // Sending comes first: other nodes wait for it.
      std::deque<Step>& queue = first_is_here() ? first_sent_ : later_sent_;
      const auto next = first_is_here() ? first_sent_.begin() : later_here();
      step = *next;
      queue.erase(next);
    }
    status = TakeStep(step);
  }
  Fail(status);
}

absl::Status NodeJob::TakeStep(const Step& step) {
  NodeBucket& bucket = *step.bucket;
  ArenaGradient gradient(*this, bucket);
  const TimePoint start = Now();
  THALWEG_ASSIGN_OR_RETURN(Part* const next, step.codec->Next(finish_pool_, gradient));
  const TimePoint end = Now();
  if (trace_) trace_.Work("compress", start, end, Describe(bucket, *step.codec));
  {
    MutexLock lock(mutex_);
    bucket.reduce_time += end - start;
    if (next != nullptr) {
      next->BeginRound();
      later_sent_.push_back({step.bucket, step.codec, next});
    }
  }
  if (next != nullptr) return SendPart(bucket, *step.codec, *next, finish_pool_);
  FinishCodec(bucket, *step.part);
  return absl::OkStatus();
}

void NodeJob::OnGetCodecState(uint32_t local_rank) {
  if (const absl::Status status = SendCodecState(local_rank); !status.ok()) Fail(status);
}

void NodeJob::OnCodecState(uint32_t local_rank, const CodecState& message, UniqueFd arena) {
  absl::Status status = TakeCodecState(message, std::move(arena));
  if (status.ok()) return;
  MutexLock lock(mutex_);
  FailLocked(absl::Status(
      status.code(), absl::StrCat("rank ", workers_[local_rank].rank, ": ", status.message())));
}

absl::Status NodeJob::CheckIdleLocked() const {
  for (const auto& [index, bucket] : buckets_) {
    if (!bucket->in_flight()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("codec state was asked for or loaded while round ", bucket->round,
                     " of bucket ", ToString(bucket->id), " was in flight"));
  }
  return absl::OkStatus();
}

absl::Status NodeJob::SaveStatesLocked() {
  for (const auto& [index, bucket] : buckets_) {
    if (bucket->in_flight()) continue;  // of a new layout: it shares no parameter with others
    for (const auto& codec : bucket->codecs) THALWEG_RETURN_IF_ERROR(codec->SaveStates());
  }
  return absl::OkStatus();
}

// Runs on the thread that reads from the worker, and no round can begin without that worker: the
// states rest, here and at the shards.
absl::Status NodeJob::SendCodecState(uint32_t local_rank) {
  ParameterStates states;
  std::vector<std::shared_ptr<NodeBucket>> buckets;
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckIdleLocked());
    THALWEG_RETURN_IF_ERROR(SaveStatesLocked());
    states = compression_.states();
    for (const auto& [index, bucket] : buckets_) buckets.push_back(bucket);
    connection = workers_[local_rank].connection;
  }
  for (const auto& bucket : buckets) {
    for (const auto& codec : bucket->codecs) {
      if (spec_.node != 0) continue;
      THALWEG_RETURN_IF_ERROR(ReadShardResiduals(shards_, *codec, timeout_.shard()));
    }
  }
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena,
                           BucketArena::Create("thalweg-codec-state", EncodedBytes(states), true));
  Encode(states, {arena.payload(), arena.payload_bytes()});
  for (const auto& bucket : buckets) {
    for (const auto& codec : bucket->codecs) codec->ForgetShardResiduals();
  }
  // A worker that cannot be told is noticed by the thread that reads from it.
  connection->Send(CodecState{arena.payload_bytes()}, arena.fd()).IgnoreError();
  return absl::OkStatus();
}

absl::Status NodeJob::TakeCodecState(const CodecState& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(const BucketArena arena,
                           BucketArena::Open(std::move(fd), message.bytes));
  THALWEG_ASSIGN_OR_RETURN(ParameterStates loaded,
                           DecodeParameterStates({arena.payload(), arena.payload_bytes()}));
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(CheckIdleLocked());
  THALWEG_RETURN_IF_ERROR(SaveStatesLocked());
  return Replace(compression_.states(), std::move(loaded));
}

}  // namespace thalweg
