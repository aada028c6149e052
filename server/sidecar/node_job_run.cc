// The way of a bucket through a NodeJob: gather, join, then wait → encode → contribute → decode →
// complete; for a node alone wait → reduce → complete.

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "server/sidecar/arena_gradient.h"
#include "server/sidecar/codec/codec_costs.h"
#include "server/sidecar/node_job.h"
#include "server/sidecar/shard_residuals.h"

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
  std::vector<CodecSpec> candidates;
  {
    MutexLock lock(mutex_);
    candidates = compression_.candidates();
  }
  request.costs = MeasureCosts(candidates, spec_.num_nodes, context_.threads);
  const std::weak_ptr<NodeJob> self = weak_from_this();
  THALWEG_RETURN_IF_ERROR(shards_.Join(
      request, [&](uint32_t shard) { return std::make_shared<ShardSink>(self, shard); },
      created_ + timeout_.sidecar()));
  const Membership agreed = shards_.agreed();
  {
    MutexLock lock(mutex_);
    chunk_bytes_ = agreed.chunk_bytes;
    compression_.Agree(agreed);
    ChoosePath();
  }
  spdlog::info(
      "job '{}': node {} of {} with {} workers, {} shards, {} on the wire in chunks of {} KiB",
      spec_.job, spec_.node, spec_.num_nodes, spec_.local_size, shards_.size(),
      spec_.codec.ToString(), agreed.chunk_bytes >> 10);
  SendWelcome(agreed);
  return absl::OkStatus();
}

void NodeJob::ChoosePath() {
  const bool use_gpus = std::all_of(workers_.begin(), workers_.end(),
                                    [](const Worker& worker) { return worker.shares_gpu.ok(); });
  if (use_gpus) device_ = context_.gpus;
  for (Worker& worker : workers_) {
    if (use_gpus) {
      context_.metrics.Workers(worker.path).Add(-1);
      worker.path = GradientPath::kIpc;
      context_.metrics.Workers(worker.path).Add(1);
    }
    std::string why;
    if (worker.path != GradientPath::kCpu && !use_gpus) {
      why = absl::StrCat("; not ipc, since ", worker.shares_gpu.ok()
                                                  ? "another worker's GPU cannot be shared"
                                                  : worker.shares_gpu.message());
    }
    spdlog::info("job '{}': rank {}: path {}{}", spec_.job, worker.rank, Name(worker.path), why);
  }
}

void NodeJob::SendWelcome(const Membership& agreed) {
  std::vector<std::pair<std::shared_ptr<Connection>, GradientPath>> workers;
  {
    MutexLock lock(mutex_);
    for (const Worker& worker : workers_) {
      if (!worker.has_left) workers.emplace_back(worker.connection, worker.path);
    }
  }
  // A worker that cannot be told is noticed by the thread that reads from it.
  for (const auto& [connection, path] : workers) {
    connection
        ->Send(Welcome{agreed.epoch, shards_.size(), THALWEG_VERSION, agreed.chunk_bytes, path})
        .IgnoreError();
  }
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
  changed_.NotifyAll();
  if (!ready_.empty()) run_changed_.NotifyAll();
}

void NodeJob::RunAtOnce(const std::shared_ptr<NodeBucket>& bucket) {
  DenseCodec& dense = *bucket->dense;
  bool can_run = spec_.num_nodes == 1 || shards_.HasPlace(dense.part().shard_of_chunk[0]);
  for (uint32_t worker = 0; worker < spec_.local_size; ++worker) {
    can_run = can_run && bucket->memory->WaitInput(worker, 1, Now()) >= 1;
  }
  if (can_run) {
    const absl::Status status = ExchangeChunk(*bucket, dense, dense.part(), 0);
    if (!status.ok()) Fail(status);
  } else {
    MutexLock lock(mutex_);
    ready_.push_front(bucket);
  }
  ReleaseRun();
}

absl::Status NodeJob::Exchange(NodeBucket& bucket) {
  if (bucket.compressed) return BeginCompressed(bucket);
  DenseCodec& dense = *bucket.dense;
  ArenaGradient gradient(*this, bucket);
  THALWEG_RETURN_IF_ERROR(dense.Begin(pool_, gradient).status());
  THALWEG_RETURN_IF_ERROR(SendPart(bucket, dense, dense.part(), pool_));
  if (dense.part().plan.Count() == 0) Complete(bucket);
  return absl::OkStatus();
}

absl::Status NodeJob::Announce(BucketCodec& codec, Part& part) {
  if (part.round == 1) {
    THALWEG_ASSIGN_OR_RETURN(part.shard_of_chunk, shards_.RegisterBucket(part.bucket, part.plan,
                                                                         Now() + timeout_.shard()));
  }
  if (spec_.node != 0) return absl::OkStatus();
  return WriteShardResiduals(shards_, codec, part, timeout_.shard());
}

absl::Status NodeJob::SendPart(NodeBucket& bucket, BucketCodec& codec, Part& part, FoldPool& pool) {
  THALWEG_RETURN_IF_ERROR(Announce(codec, part));
  return pool.Run(part.plan.Count(),
                  [&](uint32_t chunk) { return ExchangeChunk(bucket, codec, part, chunk); });
}

absl::Status NodeJob::ExchangeChunk(NodeBucket& bucket, BucketCodec& codec, Part& part,
                                    uint32_t chunk) {
  if (spec_.num_nodes == 1) return ReduceAlone(bucket, chunk);
  ArenaGradient gradient(*this, bucket);
  const TimePoint start = Now();
  THALWEG_ASSIGN_OR_RETURN(const std::span<const std::byte> share,
                           codec.Encode(part, chunk, gradient));
  Contribution contribution;
  contribution.id = {part.bucket.id, chunk, part.round};
  contribution.wire = part.bucket.wire;
  contribution.elems = part.plan.Elems(chunk);
  contribution.payload = Payload(share, bucket.shared_from_this());
  TimePoint encoded;
  {
    MutexLock lock(mutex_);
    encoded = Now();
    bucket.reduce_time += encoded - start - gradient.waited();
    codec.traffic.sent += share.size();
    if (!bucket.first_sent) bucket.first_sent = encoded;
    part.sent[chunk] = encoded;
  }
  // Its result may be here, and the round over, before Contribute returns.
  std::optional<TraceSubject> what;
  if (trace_) what = Describe(bucket, codec, part, chunk, share.size());
  const absl::Status sent = shards_.Contribute(part.shard_of_chunk[chunk], std::move(contribution),
                                               encoded + timeout_.sidecar());
  if (what) {
    trace_.Work("reduce", start, encoded, *what);
    trace_.Work("send", encoded, Now(), *std::move(what));
  }
  return sent;
}

absl::Status NodeJob::WaitInputs(NodeBucket& bucket, uint32_t chunks) {
  const TimePoint start = Now();
  for (uint32_t worker = 0; worker < spec_.local_size; ++worker) {
    while (bucket.memory->WaitInput(worker, chunks, Now() + kLookAround) < chunks) {
      MutexLock lock(mutex_);
      THALWEG_RETURN_IF_ERROR(StoppedLocked());
      if (Now() - start > timeout_.sidecar()) {
        return absl::DeadlineExceededError(
            absl::StrCat("rank ", workers_[worker].rank, " stopped filling bucket ",
                         ToString(bucket.id), " round ", bucket.round, " at chunk ", chunks - 1));
      }
    }
  }
  const TimePoint end = Now();
  if (trace_) trace_.Work("wait_copy", start, end, Describe(bucket));
  MutexLock lock(mutex_);
  bucket.wait_time += end - start;
  return absl::OkStatus();
}

absl::Status NodeJob::ReduceAlone(NodeBucket& bucket, uint32_t chunk) {
  DenseCodec& dense = *bucket.dense;
  ArenaGradient gradient(*this, bucket);
  const TimePoint start = Now();
  RoundResult result;
  result.id = {bucket.id, chunk, dense.part().round};
  result.workers = spec_.world_size;
  THALWEG_ASSIGN_OR_RETURN(result.nonfinite_elems, dense.Reduce(chunk, gradient));
  bool is_complete = false;
  {
    MutexLock lock(mutex_);
    last_progress_ = Now();
    bucket.reduce_time += last_progress_ - start - gradient.waited();
    is_complete = bucket.FinishChunk(dense.part(), result);
    if (trace_) {
      trace_.Work("reduce", start, last_progress_, Describe(bucket, dense, dense.part(), chunk, 0));
    }
  }
  if (is_complete) FinishCodec(bucket, dense.part());
  return absl::OkStatus();
}

void NodeJob::OnResult(uint32_t shard, const RoundResult& received) {
  std::shared_ptr<NodeBucket> bucket;
  BucketCodec* codec = nullptr;
  Part* part = nullptr;
  absl::Status status;
  TimePoint sent;
  {
    MutexLock lock(mutex_);
    if (!StoppedLocked().ok()) return;
    const auto found = buckets_.find(received.id.bucket.index);
    if (found != buckets_.end()) {
      bucket = found->second;
      codec = bucket->FindCodec(received.id.bucket.part);
    }
    if (codec != nullptr) part = codec->FindPart(received.id.bucket.part);
    status = part != nullptr && part->bucket.id == received.id.bucket
                 ? part->Claim(received)
                 : absl::InvalidArgumentError(
                       absl::StrCat("result for unknown bucket ", ToString(received.id.bucket)));
    if (status.ok()) sent = part->sent[received.id.chunk];
  }
  const TimePoint start = Now();
  if (status.ok()) status = codec->Decode(*part, received);
  if (!status.ok()) {
    Fail(absl::Status(status.code(),
                      absl::StrCat("aggregator shard ", shard, ": ", status.message())));
    return;
  }
  shards_.OnAnswered(shard, received.id.bucket.part);
  bool is_here = false;
  bool is_last = false;
  {
    MutexLock lock(mutex_);
    last_progress_ = Now();
    if (trace_) {
      TraceResult(Describe(*bucket, *codec, *part, received.id.chunk, received.payload.SizeBytes()),
                  sent, start, last_progress_);
    }
    bucket->decode_time += last_progress_ - start;
    codec->traffic.received += received.payload.SizeBytes();
    is_here = bucket->FinishChunk(*part, received);
    is_last = is_here && codec->EndsWith(*part);
    if (is_here && !is_last) finish_changed_.NotifyAll();
  }
  if (is_last) FinishCodec(*bucket, *part);
}

void NodeJob::FinishCodec(NodeBucket& bucket, const Part& last) {
  bool is_over = false;
  {
    MutexLock lock(mutex_);
    is_over = bucket.FinishCodec(last);
    if (is_over && bucket.compressed) compression_.Count(bucket);
  }
  if (is_over) Complete(bucket);
}

void NodeJob::Complete(NodeBucket& bucket) {
  const TimePoint start = Now();
  if (const absl::Status status = bucket.memory->EndRound(); !status.ok()) return Fail(status);
  CountTraffic(bucket);
  ::thalweg::Complete message;
  Duration total{};
  {
    MutexLock lock(mutex_);
    const TimePoint now = Now();
    bucket.FinishRound(now);
    total = now - bucket.ready_since;
    if (--num_in_flight_ == 0) {
      context_.metrics.exchange_seconds.Add(ToSeconds(now - in_flight_since_));
    }
    message.id = bucket.id;
    message.round = bucket.round;
    message.workers = bucket.workers;
    for (const BucketCodec* codec : bucket.CodecsInUse()) {
      message.nonfinite_elems += codec->nonfinite_elems();
      message.wire_bytes_sent += codec->traffic.sent;
      message.wire_bytes_received += codec->traffic.received;
    }
    message.reduce_ns = static_cast<uint64_t>(ToNanos(bucket.reduce_time));
    message.wait_ns = static_cast<uint64_t>(ToNanos(bucket.wait_time));
    message.wire_ns = static_cast<uint64_t>(ToNanos(bucket.wire_time));
    message.decode_ns = static_cast<uint64_t>(ToNanos(bucket.decode_time));
    compression_.Describe(message);
  }
  CountTimes(message, total);
  // What the trace says, before the workers know: then the next round may begin.
  const TraceSubject what = trace_ ? Describe(bucket) : TraceSubject();
  const TimePoint first_submit = bucket.first_submit;
  const TimePoint ready_since = bucket.ready_since;
  Broadcast(message);
  if (trace_) TraceRound(what, first_submit, ready_since, start);
}

}  // namespace thalweg
