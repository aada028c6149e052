// How a NodeJob takes a compressed bucket through its round: see PowerSgd for the steps.

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/node_job.h"

namespace thalweg {

// A bucket's gradient as its workers' arenas hold it. One thread reads an element at a time.
class NodeJob::Gradient : public GradientSource {
 public:
  Gradient(NodeJob& job, NodeBucket& bucket) : job_(job), bucket_(bucket) {}

  absl::Status WaitFor(uint64_t end) override {
    return job_.WaitInputs(bucket_, bucket_.dense.plan.ChunkOf(end - 1) + 1);
  }

  const float* Read(uint64_t begin, uint64_t elems, std::vector<float>& tile) override {
    const std::vector<const void*> shares = bucket_.Shares(begin);
    Device& device = job_.context_.device;
    if (bucket_.share == DType::kFloat32) {
      if (shares.size() == 1) return static_cast<const float*>(shares[0]);
      tile.resize(elems);
      device.Encode(shares, DType::kFloat32, DType::kFloat32, elems, tile.data());
      return tile.data();
    }
    tile.resize(elems);
    // Folded in the workers' own type, as it would be without compression, then widened.
    std::vector<std::byte> narrow(elems * SizeOf(bucket_.share));
    device.Encode(shares, bucket_.share, bucket_.share, elems, narrow.data());
    device.Decode(Payload(narrow, nullptr), bucket_.share, DType::kFloat32, elems,
                  tile.data())
        .IgnoreError();  // the size is right
    return tile.data();
  }

 private:
  NodeJob& job_;
  NodeBucket& bucket_;
};

absl::Status NodeJob::SendPart(NodeBucket& bucket, Part& part) {
  THALWEG_RETURN_IF_ERROR(Announce(part));
  for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
    THALWEG_RETURN_IF_ERROR(SendChunk(bucket, part, chunk));
  }
  return absl::OkStatus();
}

absl::Status NodeJob::BeginCompressed(NodeBucket& bucket) {
  PowerSgd& codec = *bucket.power_sgd;
  Gradient gradient(*this, bucket);
  const TimePoint start = Now();
  THALWEG_RETURN_IF_ERROR(codec.Project(pool_, context_.device, gradient));
  {
    MutexLock lock(mutex_);
    bucket.reduce_time += Now() - start;
    codec.first().BeginRound();
    first_sent_.push_back(bucket.shared_from_this());
  }
  return SendPart(bucket, codec.first());
}

void NodeJob::FinishLoop() {
  absl::Status status;
  while (status.ok()) {
    std::shared_ptr<NodeBucket> bucket;
    bool is_last = false;
    {
      MutexLock lock(mutex_);
      const auto first_is_here = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !first_sent_.empty() && !first_sent_.front()->power_sgd->first().in_flight;
      };
      const auto finished = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return std::find_if(last_sent_.begin(), last_sent_.end(),
                            [](const auto& b) { return !b->last_part->in_flight; });
      };
      finish_changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return first_is_here() || finished() != last_sent_.end() || !StoppedLocked().ok();
      });
      if (!StoppedLocked().ok()) return;
      // Sending comes first: other nodes wait for it.
      is_last = !first_is_here();
      const auto next = is_last ? finished() : first_sent_.begin();
      bucket = *next;
      (is_last ? last_sent_ : first_sent_).erase(next);
    }
    status = is_last ? FinishCompressed(*bucket) : SendSecond(*bucket);
  }
  Fail(status);
}

absl::Status NodeJob::SendSecond(NodeBucket& bucket) {
  PowerSgd& codec = *bucket.power_sgd;
  const TimePoint start = Now();
  const bool go_on = codec.IsFinite();
  if (go_on) {
    THALWEG_RETURN_IF_ERROR(codec.ProjectTransposed(finish_pool_, context_.device));
  } else {
    codec.whole().send = bucket.dense.send;
    codec.whole().receive = bucket.dense.receive;
  }
  Part& part = go_on ? codec.second() : codec.whole();
  {
    MutexLock lock(mutex_);
    bucket.reduce_time += Now() - start;
    part.BeginRound();
    bucket.last_part = &part;
    last_sent_.push_back(bucket.shared_from_this());
  }
  return go_on ? SendPart(bucket, part) : ExchangeDense(bucket, part, finish_pool_);
}

absl::Status NodeJob::FinishCompressed(NodeBucket& bucket) {
  PowerSgd& codec = *bucket.power_sgd;
  const TimePoint start = Now();
  uint64_t nonfinite_elems = 0;
  if (bucket.last_part == &codec.whole()) {
    Gradient gradient(*this, bucket);
    THALWEG_RETURN_IF_ERROR(codec.GiveUp(finish_pool_, gradient));
    nonfinite_elems = codec.whole().nonfinite_elems;
  } else {
    THALWEG_ASSIGN_OR_RETURN(nonfinite_elems, codec.Reconstruct(finish_pool_, context_.device,
                                                                bucket.result->payload()));
  }
  {
    MutexLock lock(mutex_);
    bucket.reduce_time += Now() - start;
    CountCompressedLocked(bucket);
  }
  Complete(bucket, *bucket.last_part, nonfinite_elems);
  return absl::OkStatus();
}

void NodeJob::CountCompressedLocked(const NodeBucket& bucket) {
  SidecarMetrics& metrics = context_.metrics;
  if (bucket.last_part == &bucket.power_sgd->whole()) {
    metrics.given_up_buckets.Add();
    return;
  }
  metrics.compressed_buckets.Add();
  if (!has_compressed_) {
    has_compressed_ = true;
    spdlog::info("job '{}': compression has begun in round {} of bucket {}", spec_.job,
                 bucket.round, ToString(bucket.id));
  }
  CompressionLoss loss;
  for (const auto& [index, other] : buckets_) {
    if (other->power_sgd == nullptr) continue;
    loss.residual += other->power_sgd->loss().residual;
    loss.whole += other->power_sgd->loss().whole;
  }
  metrics.residual_norm.Set(std::sqrt(loss.residual));
  if (loss.whole > 0) metrics.compression_error.Set(std::sqrt(loss.residual / loss.whole));
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
// states rest.
absl::Status NodeJob::SendCodecState(uint32_t local_rank) {
  MatrixStates states;
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckIdleLocked());
    states = matrices_;
    connection = workers_[local_rank].connection;
  }
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena,
                           BucketArena::Create("thalweg-codec-state", EncodedBytes(states), true));
  Encode(states, {arena.payload(), arena.payload_bytes()});
  // A worker that cannot be told is noticed by the thread that reads from it.
  connection->Send(CodecState{arena.payload_bytes()}, arena.fd()).IgnoreError();
  return absl::OkStatus();
}

absl::Status NodeJob::TakeCodecState(const CodecState& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(const BucketArena arena,
                           BucketArena::Open(std::move(fd), message.bytes));
  THALWEG_ASSIGN_OR_RETURN(MatrixStates loaded,
                           DecodeMatrixStates({arena.payload(), arena.payload_bytes()}));
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(CheckIdleLocked());
  return Replace(matrices_, std::move(loaded));
}

}  // namespace thalweg
