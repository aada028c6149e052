// The way of a bucket through a NodeJob: gather, join, then wait → encode → contribute → decode →
// complete; for a node alone wait → reduce → complete.

#include <spdlog/spdlog.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "server/sidecar/node_job.h"

namespace thalweg {
namespace {

// How long the run thread waits for a worker's chunks before it looks whether the job still lives.
constexpr Duration kLookAround = std::chrono::milliseconds(50);

// What one shard tells the job. Refers to it weakly: shards may hold on to a sink longer.
class ShardSink : public NodeSink {
 public:
  ShardSink(std::weak_ptr<NodeJob> job, uint32_t shard) : job_(std::move(job)), shard_(shard) {}

  void OnResult(RoundResult result) override {
    if (const auto job = job_.lock()) job->OnResult(shard_, result);
  }
  void OnFailed(absl::Status why) override {
    if (const auto job = job_.lock()) job->Fail(why);
  }

 private:
  const std::weak_ptr<NodeJob> job_;
  const uint32_t shard_;
};

}  // namespace

void NodeJob::Run() {
  absl::Status status = Gather();
  if (status.ok()) status = JoinShards();
  while (status.ok()) {
    const std::shared_ptr<NodeBucket> bucket = NextBucket();
    if (bucket == nullptr) return;
    status = Exchange(*bucket);
    ReleaseRun();
  }
  Fail(status);
}

absl::Status NodeJob::Gather() {
  MutexLock lock(mutex_);
  // The monitor fails the job when its workers take too long.
  changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return num_here_ == spec_.local_size || !StoppedLocked().ok();
  });
  THALWEG_RETURN_IF_ERROR(StoppedLocked());
  gathered_ = true;
  return absl::OkStatus();
}

absl::Status NodeJob::JoinShards() {
  JoinRequest request;
  request.job = spec_.job;
  request.node = spec_.node;
  request.node_name = spec_.node_name;
  request.workers = spec_.local_size;
  request.num_nodes = spec_.num_nodes;
  request.world_size = spec_.world_size;
  request.chunk_bytes = spec_.chunk_bytes;
  request.window_chunks = context_.window_chunks;
  request.codec = spec_.codec;
  request.round_timeout = timeout_.shard();
  const std::weak_ptr<NodeJob> self = weak_from_this();
  THALWEG_RETURN_IF_ERROR(shards_.Join(
      request, [&](uint32_t shard) { return std::make_shared<ShardSink>(self, shard); },
      created_ + timeout_.sidecar()));
  const uint64_t chunk_bytes = shards_.chunk_bytes();
  {
    MutexLock lock(mutex_);
    chunk_bytes_ = chunk_bytes;
  }
  spdlog::info(
      "job '{}': node {} of {} with {} workers, {} shards, {} on the wire in chunks of {} KiB",
      spec_.job, spec_.node, spec_.num_nodes, spec_.local_size, shards_.size(),
      spec_.codec.ToString(), chunk_bytes >> 10);
  Broadcast(Welcome{shards_.epoch(), shards_.size(), THALWEG_VERSION, chunk_bytes});
  return absl::OkStatus();
}

std::shared_ptr<NodeBucket> NodeJob::NextBucket() {
  MutexLock lock(mutex_);
  run_changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return (!ready_.empty() && !running_) || !StoppedLocked().ok();
  });
  if (!StoppedLocked().ok()) return nullptr;
  running_ = true;
  std::shared_ptr<NodeBucket> bucket = std::move(ready_.front());
  ready_.pop_front();
  return bucket;
}

void NodeJob::ReleaseRun() {
  MutexLock lock(mutex_);
  running_ = false;
  if (!ready_.empty()) run_changed_.NotifyAll();
}

void NodeJob::RunAtOnce(const std::shared_ptr<NodeBucket>& bucket) {
  bool can_run = spec_.num_nodes == 1 || shards_.HasPlace(bucket->dense.shard_of_chunk[0]);
  for (const auto& input : bucket->inputs) {
    can_run = can_run && input->WaitReady(1, Now()) >= 1;
  }
  if (can_run) {
    const absl::Status status = ExchangeChunk(*bucket, bucket->dense, 0);
    if (!status.ok()) Fail(status);
  } else {
    MutexLock lock(mutex_);
    ready_.push_front(bucket);
  }
  ReleaseRun();
}

absl::Status NodeJob::Exchange(NodeBucket& bucket) {
  if (bucket.compressed) return BeginCompressed(bucket);
  if (bucket.dense.plan.Count() == 0) {
    THALWEG_RETURN_IF_ERROR(Announce(bucket.dense));
    Complete(bucket, bucket.dense, 0);
    return absl::OkStatus();
  }
  return ExchangeDense(bucket, bucket.dense, pool_);
}

absl::Status NodeJob::Announce(Part& part) {
  if (part.round > 1) return absl::OkStatus();
  THALWEG_ASSIGN_OR_RETURN(part.shard_of_chunk, shards_.RegisterBucket(part.bucket, part.plan,
                                                                       Now() + timeout_.shard()));
  return absl::OkStatus();
}

// `part` is the whole bucket.
absl::Status NodeJob::ExchangeDense(NodeBucket& bucket, Part& part, FoldPool& pool) {
  THALWEG_RETURN_IF_ERROR(Announce(part));
  return pool.Run(part.plan.Count(), [&](uint32_t chunk) -> absl::Status {
    THALWEG_RETURN_IF_ERROR(WaitInputs(bucket, chunk + 1));
    return ExchangeChunk(bucket, part, chunk);
  });
}

absl::Status NodeJob::ExchangeChunk(NodeBucket& bucket, Part& part, uint32_t chunk) {
  if (spec_.num_nodes == 1) return ReduceAlone(bucket, chunk);
  if (bucket.encoded != nullptr) EncodeChunk(bucket, chunk);
  return SendChunk(bucket, part, chunk);
}

absl::Status NodeJob::WaitInputs(NodeBucket& bucket, uint32_t chunks) {
  const TimePoint start = Now();
  for (size_t worker = 0; worker < bucket.inputs.size(); ++worker) {
    while (bucket.inputs[worker]->WaitReady(chunks, Now() + kLookAround) < chunks) {
      MutexLock lock(mutex_);
      THALWEG_RETURN_IF_ERROR(StoppedLocked());
      if (Now() - start > timeout_.sidecar()) {
        return absl::DeadlineExceededError(
            absl::StrCat("rank ", workers_[worker].rank, " stopped filling bucket ",
                         ToString(bucket.id), " round ", bucket.round, " at chunk ", chunks - 1));
      }
    }
  }
  MutexLock lock(mutex_);
  bucket.wait_time += Now() - start;
  return absl::OkStatus();
}

void NodeJob::EncodeChunk(NodeBucket& bucket, uint32_t chunk) {
  const Part& part = bucket.dense;
  const uint64_t begin = part.plan.Begin(chunk);
  const TimePoint start = Now();
  context_.device.Encode(bucket.Shares(begin), bucket.share, part.WireType(),
                         part.plan.Elems(chunk),
                         bucket.encoded.get() + begin * SizeOf(part.WireType()));
  MutexLock lock(mutex_);
  bucket.reduce_time += Now() - start;
}

absl::Status NodeJob::SendChunk(NodeBucket& bucket, Part& part, uint32_t chunk) {
  Contribution contribution;
  contribution.id = {part.bucket.id, chunk, part.round};
  contribution.wire = part.bucket.wire;
  contribution.elems = part.plan.Elems(chunk);
  contribution.payload = bucket.EncodedShare(part, chunk);
  {
    MutexLock lock(mutex_);
    if (!bucket.first_sent) bucket.first_sent = Now();
  }
  return shards_.Contribute(part.shard_of_chunk[chunk], std::move(contribution),
                            Now() + timeout_.sidecar());
}

// The mean over the only node is the result; it takes the wire type's precision all the same, so
// that the numbers do not depend on where the aggregator is.
absl::Status NodeJob::ReduceAlone(NodeBucket& bucket, uint32_t chunk) {
  Part& part = bucket.dense;
  const uint64_t elems = part.plan.Elems(chunk);
  const std::vector<const void*> shares = bucket.Shares(part.plan.Begin(chunk));
  const DType wire = part.WireType();
  RoundResult result;
  result.id = {bucket.id, chunk, part.round};
  result.workers = spec_.world_size;
  const TimePoint start = Now();
  if (wire == bucket.layout.dtype) {
    result.nonfinite_elems =
        context_.device.Encode(shares, bucket.share, wire, elems, part.Destination(chunk));
  } else {
    const size_t bytes = elems * SizeOf(wire);
    const auto scratch = std::make_unique_for_overwrite<std::byte[]>(bytes);
    result.nonfinite_elems =
        context_.device.Encode(shares, bucket.share, wire, elems, scratch.get());
    THALWEG_RETURN_IF_ERROR(context_.device.Decode(Payload({scratch.get(), bytes}, nullptr), wire,
                                                   bucket.layout.dtype, elems,
                                                   part.Destination(chunk)));
  }
  bool is_complete = false;
  {
    MutexLock lock(mutex_);
    last_progress_ = Now();
    bucket.reduce_time += last_progress_ - start;
    is_complete = bucket.FinishChunk(part, result);
  }
  if (is_complete) Complete(bucket, part, part.nonfinite_elems);
  return absl::OkStatus();
}

void NodeJob::OnResult(uint32_t shard, const RoundResult& received) {
  std::shared_ptr<NodeBucket> bucket;
  Part* part = nullptr;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (!StoppedLocked().ok()) return;
    const auto found = buckets_.find(received.id.bucket.index);
    if (found != buckets_.end()) part = found->second->FindPart(received.id.bucket.part);
    if (part == nullptr || part->bucket.id != received.id.bucket) {
      status = absl::InvalidArgumentError(
          absl::StrCat("result for unknown bucket ", ToString(received.id.bucket)));
    } else {
      bucket = found->second;
      status = part->Claim(received);
    }
  }
  if (status.ok()) {
    status = context_.device.Decode(received.payload, part->WireType(), part->bucket.layout.dtype,
                                    received.elems, part->Destination(received.id.chunk));
  }
  if (!status.ok()) {
    Fail(absl::Status(status.code(),
                      absl::StrCat("aggregator shard ", shard, ": ", status.message())));
    return;
  }
  shards_.OnAnswered(shard, received.id.bucket.part);
  bool is_complete = false;
  {
    MutexLock lock(mutex_);
    last_progress_ = Now();
    const bool part_is_here = bucket->FinishChunk(*part, received);
    is_complete = part_is_here && !bucket->compressed;
    if (part_is_here && bucket->compressed) finish_changed_.NotifyAll();
  }
  if (is_complete) Complete(*bucket, *part, part->nonfinite_elems);
}

void NodeJob::Complete(NodeBucket& bucket, const Part& last, uint64_t nonfinite_elems) {
  ::thalweg::Complete message;
  uint64_t wire_bytes = spec_.num_nodes == 1 ? 0 : last.WireBytes();
  if (bucket.compressed) wire_bytes += bucket.power_sgd->first().WireBytes();
  {
    MutexLock lock(mutex_);
    bucket.FinishRound(last, Now());
    message = {bucket.id,
               bucket.round,
               bucket.workers,
               nonfinite_elems,
               wire_bytes,
               wire_bytes,
               static_cast<uint64_t>(ToNanos(bucket.reduce_time)),
               static_cast<uint64_t>(ToNanos(bucket.wait_time)),
               static_cast<uint64_t>(ToNanos(bucket.wire_time))};
  }
  SidecarMetrics& metrics = context_.metrics;
  const std::string codec = bucket.compressed ? spec_.codec.Name() : Name(bucket.dense.bucket.wire);
  for (const char* direction : {"sent", "received"}) {
    const Labels labels = {{"codec", codec}, {"direction", direction}};
    metrics.registry
        .GetCounter("thalweg_sidecar_raw_bytes_total",
                    "Gradient bytes before encoding (sent) and after decoding (received)", labels)
        .Add(static_cast<double>(bucket.RawBytes()));
    metrics.registry
        .GetCounter("thalweg_sidecar_wire_bytes_total", "Encoded gradient bytes exchanged", labels)
        .Add(static_cast<double>(message.wire_bytes_sent));
  }
  metrics.buckets.Add();
  metrics.nonfinite.Add(static_cast<double>(message.nonfinite_elems));
  metrics.wait_seconds.Add(static_cast<double>(message.wait_ns) * 1e-9);
  metrics.reduce_seconds.Add(static_cast<double>(message.reduce_ns) * 1e-9);
  metrics.wire_seconds.Add(static_cast<double>(message.wire_ns) * 1e-9);
  Broadcast(message);
}

}  // namespace thalweg
