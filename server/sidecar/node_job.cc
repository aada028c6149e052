// The workers' side of a NodeJob, and its deadlines. The way of a bucket is in node_job_run.cc.

#include "server/sidecar/node_job.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/log.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// Often enough that the sidecar's reason reaches workers before their own patience ends.
Duration MonitorInterval(const LayeredTimeout& timeout) {
  return std::clamp<Duration>(timeout.worker / 50, std::chrono::milliseconds(2),
                              std::chrono::milliseconds(100));
}

// Whether there may be something to do between a bucket's first part and its result.
bool HasSteps(const CodecPolicy& policy) {
  const std::vector<CodecSpec> codecs = policy.Codecs();
  return std::any_of(codecs.begin(), codecs.end(),
                     [](const CodecSpec& codec) { return codec.kind == CodecKind::kPowerSgd; });
}

}  // namespace

std::shared_ptr<NodeJob> NodeJob::Start(const Hello& first, NodeContext& context) {
  std::shared_ptr<NodeJob> job(new NodeJob(first, context));
  NodeJob* raw = job.get();  // the destructor joins both threads
  job->run_thread_ = Thread("job-run", [raw] { raw->Run(); });
  if (HasSteps(job->spec_.codec)) {
    job->finish_thread_ = Thread("job-finish", [raw] { raw->FinishLoop(); });
  }
  job->monitor_thread_ = Thread("job-monitor", [raw] { raw->Monitor(); });
  return job;
}

NodeJob::NodeJob(const Hello& first, NodeContext& context)
    : spec_(first),
      timeout_{std::chrono::milliseconds(first.timeout_ms)},
      created_(Now()),
      context_(context),
      trace_(context.trace, "sidecar", first.job,
             {{"node", first.node}, {"num_nodes", first.num_nodes}}),
      shards_(context.shards, context.metrics.registry, context.trace),
      pool_(context.threads),
      finish_pool_(HasSteps(first.codec) ? context.threads : 1),
      device_(&context.device),
      workers_(first.local_size),
      compression_(first.job, first.codec, first.num_nodes, shards_.size(), context.metrics) {}

void NodeJob::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    run_changed_.NotifyAll();
    finish_changed_.NotifyAll();
  }
  run_thread_.Join();
  finish_thread_.Join();
  monitor_thread_.Join();
}

absl::Status NodeJob::CheckSameJob(const Hello& h) const {
  const auto differs = [&](const char* what, const auto& theirs, const auto& ours) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", h.rank, " says ", what, " is ", theirs,
                                                   ", rank ", spec_.rank, " says ", ours));
  };
  if (h.world_size != spec_.world_size) {
    return differs("the world size", h.world_size, spec_.world_size);
  }
  if (h.num_nodes != spec_.num_nodes) {
    return differs("the number of nodes", h.num_nodes, spec_.num_nodes);
  }
  if (h.node != spec_.node) return differs("the number of this node", h.node, spec_.node);
  if (h.local_size != spec_.local_size) {
    return differs("the number of workers on this node", h.local_size, spec_.local_size);
  }
  if (h.codec != spec_.codec) {
    return differs("the codec", h.codec.ToString(), spec_.codec.ToString());
  }
  if (h.chunk_bytes != spec_.chunk_bytes) {
    return differs("the chunk size in bytes", h.chunk_bytes, spec_.chunk_bytes);
  }
  if (h.timeout_ms != spec_.timeout_ms) {
    return differs("the timeout in ms", h.timeout_ms, spec_.timeout_ms);
  }
  return absl::OkStatus();
}

absl::Status NodeJob::ProbeGpu(const Hello& hello) const {
  if (hello.probe == DeviceMemory())
    return absl::UnavailableError("the worker has offered no memory");
  if (context_.gpus == nullptr) return absl::UnavailableError("this sidecar has no GPU");
  return context_.gpus->Probe(hello.probe);
}

absl::Status NodeJob::AddWorker(const Hello& hello, std::shared_ptr<Connection> connection) {
  absl::Status refusal = CheckSameJob(hello);
  const absl::Status shares_gpu = ProbeGpu(hello);
  bool fatal = false;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(StoppedLocked());
    fatal = !refusal.ok() && !gathered_;
    if (refusal.ok()) {
      for (const Worker& worker : workers_) {
        const bool same_seat = &worker == &workers_[hello.local_rank];
        if (worker.connection == nullptr || !(same_seat || worker.rank == hello.rank)) continue;
        const auto peer = worker.connection->Peer();
        refusal = absl::AlreadyExistsError(
            absl::StrCat("job '", spec_.job, "' has a rank ", hello.rank, " already",
                         peer.ok() ? absl::StrCat(" (process ", peer->pid, ")") : "",
                         "; two workers must not have the same rank"));
      }
    }
    if (refusal.ok()) {
      workers_[hello.local_rank] = {std::move(connection), hello.rank, hello.path, shares_gpu,
                                    false};
      ++num_here_;
      context_.metrics.Workers(hello.path).Add(1);
      changed_.NotifyAll();
    }
  }
  if (fatal) Fail(refusal);
  return OfJob(spec_.job, refusal);
}

void NodeJob::OnRegisterBucket(uint32_t local_rank, const RegisterBucket& message, UniqueFd arena) {
  auto bucket = TakeLayout(local_rank, message, std::move(arena));
  if (!bucket.ok()) {
    Fail(bucket.status());
    return;
  }
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = workers_[local_rank].connection;
  }
  // A worker that cannot be told is noticed by the thread that reads from it.
  const BucketMemory& memory = *(*bucket)->memory;
  connection->Send(BucketReady{message.id, memory.ResultFor(local_rank)}, memory.result().fd())
      .IgnoreError();
}

absl::StatusOr<std::shared_ptr<NodeBucket>> NodeJob::TakeLayout(uint32_t local_rank,
                                                                const RegisterBucket& message,
                                                                UniqueFd arena) {
  MutexLock lock(mutex_);
  const std::string owner = absl::StrCat("rank ", workers_[local_rank].rank);
  if (chunk_bytes_ == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(owner, " announced bucket ", ToString(message.id), " before it was welcomed"));
  }
  const auto known = buckets_.find(message.id.index);
  std::shared_ptr<NodeBucket> bucket = known == buckets_.end() ? nullptr : known->second;
  if (bucket != nullptr && message.id < bucket->id) {
    return absl::FailedPreconditionError(absl::StrCat(owner, " announced bucket ",
                                                      ToString(message.id), ", but ", bucket->owner,
                                                      " has replaced that layout"));
  }
  if (bucket != nullptr && bucket->id == message.id) {
    THALWEG_RETURN_IF_ERROR(
        CheckSameLayout(message.id, bucket->layout, bucket->owner, message.layout, owner));
  } else {
    if (bucket != nullptr && bucket->in_flight()) {
      return absl::FailedPreconditionError(
          absl::StrCat(owner, " announced bucket ", ToString(message.id),
                       " while a round of its earlier layout is in flight"));
    }
    THALWEG_RETURN_IF_ERROR(SaveStatesLocked());
    BucketTerms terms;
    terms.codec = spec_.codec;
    terms.chunk_bytes = chunk_bytes_;
    terms.num_shards = shards_.size();
    terms.num_nodes = spec_.num_nodes;
    terms.local_size = spec_.local_size;
    terms.path = workers_[0].path;
    terms.device = device_;
    terms.patience = timeout_.sidecar();
    THALWEG_ASSIGN_OR_RETURN(
        bucket,
        NodeBucket::Create(message.id, message.layout, owner, terms,
                           compression_.Choose(message.id, message.layout), compression_.states()));
    buckets_[message.id.index] = bucket;
  }
  THALWEG_RETURN_IF_ERROR(bucket->AddInput(local_rank, std::move(arena), message.memory));
  return bucket;
}

void NodeJob::OnSubmit(uint32_t local_rank, const Submit& message) {
  const auto to_run = TakeSubmit(local_rank, message);
  if (!to_run.ok()) {
    Fail(to_run.status());
  } else if (*to_run != nullptr) {
    RunAtOnce(*to_run);
  }
}

absl::StatusOr<std::shared_ptr<NodeBucket>> NodeJob::TakeSubmit(uint32_t local_rank,
                                                                const Submit& message) {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(message.id.index);
  if (found == buckets_.end() || found->second->id != message.id) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(message.id), " was submitted but never announced"));
  }
  for (const Worker& worker : workers_) {
    if (!worker.has_left) continue;
    return absl::AbortedError(absl::StrCat("bucket ", ToString(message.id), " round ",
                                           message.round, " cannot complete: rank ", worker.rank,
                                           " has left the job"));
  }
  const std::shared_ptr<NodeBucket>& bucket = found->second;
  THALWEG_ASSIGN_OR_RETURN(const bool is_ready, bucket->Submit(local_rank, message.round, Now()));
  last_progress_ = Now();
  if (!is_ready) return nullptr;
  if (num_in_flight_++ == 0) in_flight_since_ = last_progress_;
  // The first round registers the bucket, which waits for the shards.
  if (!running_ && ready_.empty() && !bucket->compressed && bucket->dense->part().round > 1 &&
      bucket->dense->part().plan.Count() == 1) {
    running_ = true;
    return bucket;
  }
  ready_.push_back(bucket);
  run_changed_.NotifyAll();
  return nullptr;
}

void NodeJob::WorkerLeft(uint32_t local_rank, const absl::Status& reason) {
  absl::Status failure;
  {
    MutexLock lock(mutex_);
    Worker& worker = workers_[local_rank];
    worker.has_left = true;
    ++num_left_;
    context_.metrics.Workers(worker.path).Add(-1);
    if (!reason.ok()) {
      failure =
          absl::Status(reason.code(), absl::StrCat("rank ", worker.rank, " on ", spec_.node_name,
                                                   " is gone: ", reason.message()));
    } else if (!gathered_) {
      failure =
          absl::AbortedError(absl::StrCat("rank ", worker.rank, " left before the job began"));
    }
    for (const auto& [index, bucket] : buckets_) {
      const auto missing = bucket->MissingWorkers();
      if (!failure.ok() || std::find(missing.begin(), missing.end(), local_rank) == missing.end()) {
        continue;
      }
      failure = absl::AbortedError(absl::StrCat("rank ", worker.rank, " left while round ",
                                                bucket->round + 1, " of bucket ",
                                                ToString(bucket->id), " waited for it"));
    }
    changed_.NotifyAll();
    run_changed_.NotifyAll();
    finish_changed_.NotifyAll();
    // Under the same lock, so that nobody finds the worker gone and gives that as the reason.
    if (!failure.ok()) FailLocked(failure);
  }
}

void NodeJob::ReleaseWorker(uint32_t local_rank) {
  std::vector<std::shared_ptr<NodeBucket>> buckets;
  {
    MutexLock lock(mutex_);
    // No round begins without the worker; one that has begun ends, or fails.
    changed_.WaitUntil(mutex_, Now() + timeout_.sidecar(),
                       [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !running_; });
    for (const auto& [index, bucket] : buckets_) buckets.push_back(bucket);
  }
  for (const auto& bucket : buckets) bucket->memory->DropInput(local_rank);
}

void NodeJob::Fail(const absl::Status& reason) {
  MutexLock lock(mutex_);
  FailLocked(reason);
}

void NodeJob::FailLocked(const absl::Status& reason) {
  // Only the first failure counts: the others are its consequences, or of everybody leaving.
  if (!failure_.ok() || num_left_ == spec_.local_size) return;
  failure_ = OfJob(spec_.job, reason);
  changed_.NotifyAll();
  run_changed_.NotifyAll();
  finish_changed_.NotifyAll();
}

bool NodeJob::IsFinished() {
  MutexLock lock(mutex_);
  return num_left_ > 0 && num_left_ == num_here_ &&
         (!failure_.ok() || num_here_ == spec_.local_size);
}

std::string NodeJob::RankNamesLocked(const std::vector<uint32_t>& local_ranks) const {
  std::vector<std::string> names;
  for (uint32_t r : local_ranks) names.push_back(absl::StrCat("rank ", workers_[r].rank));
  return absl::StrJoin(names, ", ");
}

absl::Status NodeJob::StoppedLocked() const {
  if (!failure_.ok()) return failure_;
  if (stopping_ || num_left_ == spec_.local_size) return absl::CancelledError("the job has ended");
  return absl::OkStatus();
}

void NodeJob::Broadcast(const Message& message) {
  std::vector<std::shared_ptr<Connection>> connections;
  {
    MutexLock lock(mutex_);
    for (const Worker& worker : workers_) {
      if (worker.connection != nullptr && !worker.has_left)
        connections.push_back(worker.connection);
    }
  }
  // A worker that cannot be told is noticed by the thread that reads from it.
  for (const auto& connection : connections) connection->Send(message).IgnoreError();
}

void NodeJob::Monitor() {
  const Duration interval = MonitorInterval(timeout_);
  TimePoint next_heartbeat = Now() + kHeartbeatInterval;
  absl::Status end;
  while (end.ok()) {
    absl::Status late;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, Now() + interval, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !StoppedLocked().ok();
      });
      end = StoppedLocked();
      if (end.ok()) late = CheckDeadlinesLocked(Now());
    }
    if (end.ok() && late.ok() && Now() >= next_heartbeat) {
      late = shards_.Heartbeat();
      next_heartbeat = Now() + kHeartbeatInterval;
    }
    if (!late.ok()) Fail(late);
  }
  absl::Status failure;
  {
    MutexLock lock(mutex_);
    failure = failure_;
  }
  context_.metrics.jobs_ended.Add(failure.code());
  if (!failure.ok()) {
    spdlog::error("{}", Text(failure));
    Broadcast(::thalweg::Fail{failure.code(), std::string(failure.message())});
  }
  shards_.Leave(failure);
}

absl::Status NodeJob::CheckDeadlinesLocked(TimePoint now) {
  const auto late = [&](const std::string& what) {
    return absl::DeadlineExceededError(absl::StrCat(
        what, " within ", ToSeconds(timeout_.sidecar()),
        " s; if that is a long but healthy pause, raise the timeout (THALWEG_TIMEOUT)"));
  };
  if (!gathered_ && num_here_ < spec_.local_size && now - created_ > timeout_.sidecar()) {
    return late(absl::StrCat("only ", num_here_, " of the ", spec_.local_size, " workers of ",
                             spec_.node_name, " connected"));
  }
  for (const auto& [index, bucket] : buckets_) {
    const auto missing = bucket->MissingWorkers();
    if (!missing.empty() && now - bucket->first_submit > timeout_.sidecar()) {
      return late(absl::StrCat("bucket ", ToString(bucket->id), " round ", bucket->round + 1, ": ",
                               RankNamesLocked(missing), " did not submit"));
    }
    // Measured from the last sign of life, so that a slow network is not taken for a dead one.
    if (bucket->in_flight() &&
        now - std::max(last_progress_, bucket->ready_since) > timeout_.sidecar()) {
      const std::vector<uint32_t> unfilled = bucket->UnfilledBy();
      if (!unfilled.empty()) {
        return late(absl::StrCat("bucket ", ToString(bucket->id), " round ", bucket->round, ": ",
                                 RankNamesLocked(unfilled), " did not make all of the gradient"));
      }
      const auto [missing_chunks, chunks] = bucket->Outstanding();
      return late(absl::StrCat("bucket ", ToString(bucket->id), " round ", bucket->round, ": ",
                               missing_chunks, " of ", chunks,
                               " chunks did not come back; missing are ", shards_.Debtors()));
    }
  }
  return absl::OkStatus();
}

}  // namespace thalweg
