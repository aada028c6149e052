// How a NodeJob takes a compressed bucket through its round: see BucketCodec for the steps.

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/arena_gradient.h"
#include "server/sidecar/codec/tensor_set.h"
#include "server/sidecar/node_job.h"

namespace thalweg {

uint32_t NodeJob::ChooseCodecLocked(BucketId id, const BucketLayout& layout) {
  std::vector<uint32_t> open;  // tensors that no rule is about
  for (uint32_t i = 0; i < layout.tensors.size(); ++i) {
    if (spec_.codec.CodecOf(layout.tensors[i]).kind == CodecKind::kAuto) open.push_back(i);
  }
  if (open.empty() || auto_terms_.candidates.empty()) return 0;
  const Choice choice = ChooseCodec(TensorSet(layout, open).layout(), auto_terms_);
  spdlog::info("job '{}': bucket {}: {}", spec_.job, ToString(id), choice.reason);
  for (uint32_t k = 0; k < auto_terms_.candidates.size(); ++k) {
    const Labels labels = {{"bucket", absl::StrCat(id.index)},
                           {"codec", auto_terms_.candidates[k].Name()}};
    context_.metrics.registry
        .GetGauge("thalweg_sidecar_auto_predicted_seconds",
                  "What auto has predicted that a codec would add to a step for this bucket",
                  labels)
        .Set(choice.seconds[k]);
    context_.metrics.registry
        .GetGauge("thalweg_sidecar_auto_choice", "1 for the codec that auto has chosen, else 0",
                  labels)
        .Set(k == choice.codec ? 1 : 0);
  }
  return choice.codec;
}

absl::Status NodeJob::BeginCompressed(NodeBucket& bucket) {
  ArenaGradient gradient(*this, bucket);
  for (const auto& codec : bucket.codecs) {
    const TimePoint start = Now();
    THALWEG_ASSIGN_OR_RETURN(Part* const part, codec->Begin(pool_, gradient));
    {
      MutexLock lock(mutex_);
      bucket.reduce_time += Now() - start;
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
  {
    MutexLock lock(mutex_);
    bucket.reduce_time += Now() - start;
    if (next != nullptr) {
      next->BeginRound();
      later_sent_.push_back({step.bucket, step.codec, next});
    }
  }
  if (next != nullptr) return SendPart(bucket, *step.codec, *next, finish_pool_);
  FinishCodec(bucket, *step.part);
  return absl::OkStatus();
}

void NodeJob::CountCompressedLocked(NodeBucket& bucket) {
  SidecarMetrics& metrics = context_.metrics;
  const auto gave_up = [](const auto& codec) { return codec->gave_up(); };
  if (std::any_of(bucket.codecs.begin(), bucket.codecs.end(), gave_up)) {
    metrics.given_up_buckets.Add();
    return;
  }
  metrics.compressed_buckets.Add();
  uint64_t rounds = 0;
  for (const auto& codec : bucket.codecs) rounds = std::max(rounds, codec->rounds());
  if (compressed_since_ == 0) {
    compressed_since_ = rounds + 1;
    metrics.compressed_since.Set(static_cast<double>(compressed_since_));
    spdlog::info("job '{}': compression has begun after {} iterations", spec_.job, rounds);
  }
  // Only this bucket's codecs are at rest.
  bucket.loss = {};
  for (const auto& codec : bucket.codecs) bucket.loss += codec->loss();
  loss_ = {};
  for (const auto& [index, other] : buckets_) loss_ += other->loss;
  metrics.residual_norm.Set(std::sqrt(loss_.residual));
  metrics.compression_error.Set(ErrorRatio(loss_));
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

// Runs on the thread that reads from the worker, and no round can begin without that worker: the
// states rest, here and at the shards.
absl::Status NodeJob::SendCodecState(uint32_t local_rank) {
  ParameterStates states;
  std::vector<std::shared_ptr<NodeBucket>> buckets;
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckIdleLocked());
    states = states_;
    for (const auto& [index, bucket] : buckets_) buckets.push_back(bucket);
    connection = workers_[local_rank].connection;
  }
  for (const auto& bucket : buckets) {
    for (const auto& codec : bucket->codecs) THALWEG_RETURN_IF_ERROR(ReadShardResiduals(*codec));
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

// They are the same for all nodes, so the first one keeps them.
absl::Status NodeJob::ReadShardResiduals(BucketCodec& codec) {
  const Part* part = codec.PartWithShardResiduals();
  if (spec_.node != 0 || part == nullptr || part->round == 0) return absl::OkStatus();
  for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
    THALWEG_ASSIGN_OR_RETURN(const std::vector<float> residual,
                             shards_.ReadResidual(part->shard_of_chunk[chunk], part->bucket.id,
                                                  chunk, Now() + timeout_.shard()));
    if (!residual.empty()) codec.KeepShardResidual(chunk, residual);
  }
  return absl::OkStatus();
}

absl::Status NodeJob::WriteShardResiduals(BucketCodec& codec, const Part& part) {
  if (spec_.node != 0 || codec.PartWithShardResiduals() != &part) return absl::OkStatus();
  for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
    const std::vector<float> residual = codec.ShardResidual(chunk);
    if (residual.empty()) continue;
    THALWEG_RETURN_IF_ERROR(shards_.WriteResidual(part.shard_of_chunk[chunk], part.bucket.id, chunk,
                                                  residual, Now() + timeout_.shard()));
  }
  codec.ForgetShardResiduals();
  return absl::OkStatus();
}

absl::Status NodeJob::TakeCodecState(const CodecState& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(const BucketArena arena,
                           BucketArena::Open(std::move(fd), message.bytes));
  THALWEG_ASSIGN_OR_RETURN(ParameterStates loaded,
                           DecodeParameterStates({arena.payload(), arena.payload_bytes()}));
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(CheckIdleLocked());
  return Replace(states_, std::move(loaded));
}

}  // namespace thalweg
