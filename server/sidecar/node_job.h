// One training job on one node: gathers the node's workers, joins the aggregators, and takes every
// bucket through its rounds.
//
//   workers' connections ──AddWorker, RegisterBucket, Submit, WorkerLeft──▶ NodeJob
//   run thread       wait for all workers → join all shards → welcome; then per bucket, in the
//                    order in which they become ready, chunk by chunk, with the fold threads'
//                    help: wait for the inputs → encode → contribute
//   shards' threads  OnResult: decode to where it belongs; the last chunk completes the bucket, or
//                    leaves a compressed one to
//   finish thread    (node_job_compress.cc) the steps of compression after the first
//   monitor thread   heartbeats, deadlines, and telling everybody when the job has failed
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/base/trace.h"
#include "core/ipc/connection.h"
#include "server/sidecar/fold_pool.h"
#include "server/sidecar/job_compression.h"
#include "server/sidecar/node_bucket.h"
#include "server/sidecar/node_context.h"
#include "server/sidecar/shard_group.h"

namespace thalweg {

// Thread-safe. Owns the threads. Fails as a whole: the first error is told to every worker and
// shard.
class NodeJob : public std::enable_shared_from_this<NodeJob> {
 public:
  // Shared: shards hold sinks that refer to the job weakly.
  static std::shared_ptr<NodeJob> Start(const Hello& first, NodeContext& context);

  // Takes a worker in. A worker that contradicts the job is refused, and fails the job while it
  // gathers. The connection is shared with the thread that reads from it.
  absl::Status AddWorker(const Hello& hello, std::shared_ptr<Connection> connection);
  void OnRegisterBucket(uint32_t local_rank, const RegisterBucket& message, UniqueFd arena);
  void OnSubmit(uint32_t local_rank, const Submit& message);
  // Both fail the job when a round is in flight, or the state is not one of this job's.
  void OnGetCodecState(uint32_t local_rank);
  void OnCodecState(uint32_t local_rank, const CodecState& message, UniqueFd arena);
  // The worker is gone, with OK when it said so itself.
  void WorkerLeft(uint32_t local_rank, const absl::Status& reason);
  // After WorkerLeft: lets go of the worker's memory, once nothing uses it any more.
  void ReleaseWorker(uint32_t local_rank);

  void OnResult(uint32_t shard, const RoundResult& result);
  void Fail(const absl::Status& reason);

  // The last worker has left: the job is over, and to be stopped.
  bool IsFinished();
  // Ends the threads, after the workers and shards have been told of a failure. Idempotent; must
  // come before the last reference goes, and not from a sink.
  void Stop();
  std::string name() const { return spec_.job; }

 private:
  struct Worker {
    std::shared_ptr<Connection> connection;  // null: not here yet
    uint32_t rank = 0;
    GradientPath path = GradientPath::kCpu;
    absl::Status shares_gpu;  // OK: the sidecar can work on its GPU's memory; else why not
    bool has_left = false;
  };
  NodeJob(const Hello& first, NodeContext& context);

  void FailLocked(const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSameJob(const Hello& hello) const;
  absl::Status ProbeGpu(const Hello& hello) const;
  absl::StatusOr<std::shared_ptr<NodeBucket>> TakeLayout(uint32_t local_rank,
                                                         const RegisterBucket& message,
                                                         UniqueFd arena);
  // Queues the bucket when it is ready. Returns it instead if it is so small that the caller shall
  // RunAtOnce: that saves waking the run thread, and decides how long the smallest allreduce takes.
  absl::StatusOr<std::shared_ptr<NodeBucket>> TakeSubmit(uint32_t local_rank,
                                                         const Submit& message);
  std::string RankNamesLocked(const std::vector<uint32_t>& local_ranks) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Takes a small bucket through its round on the caller's thread, or leaves it to the run thread
  // if that had to wait. Requires that TakeSubmit has made the caller the one that runs.
  void RunAtOnce(const std::shared_ptr<NodeBucket>& bucket);

  // Run thread.
  void Run();
  absl::Status Gather();
  absl::Status JoinShards();
  // Has gradients stay on the GPUs if that can be done with all workers' of this node.
  void ChoosePath() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendWelcome(const Membership& agreed);
  std::shared_ptr<NodeBucket> NextBucket();
  void ReleaseRun();
  absl::Status Exchange(NodeBucket& bucket);
  absl::Status Announce(BucketCodec& codec, Part& part);
  absl::Status SendPart(NodeBucket& bucket, BucketCodec& codec, Part& part, FoldPool& pool);
  absl::Status ExchangeChunk(NodeBucket& bucket, BucketCodec& codec, Part& part, uint32_t chunk);
  absl::Status ReduceAlone(NodeBucket& bucket, uint32_t chunk);
  absl::Status WaitInputs(NodeBucket& bucket, uint32_t chunks);

  // A codec at work on a bucket, with a part under way.
  struct Step {
    std::shared_ptr<NodeBucket> bucket;
    BucketCodec* codec = nullptr;
    Part* part = nullptr;
  };
  class ArenaGradient;

  // Compression. The run thread begins each bucket's round and sends the first part of each codec;
  // the finish thread takes what steps are left, as the parts come back. What follows a first part
  // is sent in the order of the first parts, which is the same on all nodes: see
  // ShardGroup::Contribute.
  absl::Status BeginCompressed(NodeBucket& bucket);
  void FinishLoop();
  absl::Status TakeStep(const Step& step);
  // The codec has its result, with `last`.
  void FinishCodec(NodeBucket& bucket, const Part& last);

  absl::Status SendCodecState(uint32_t local_rank);
  absl::Status TakeCodecState(const CodecState& message, UniqueFd arena);
  absl::Status CheckIdleLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Brings what devices keep of the states to the states, but for buckets in flight.
  absl::Status SaveStatesLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Monitor thread.
  void Monitor();
  absl::Status CheckDeadlinesLocked(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // All codecs have their results: the round is over, and the workers are told.
  void Complete(NodeBucket& bucket);
  void CountTraffic(NodeBucket& bucket);
  void CountTimes(const ::thalweg::Complete& message, Duration total);
  void Broadcast(const Message& message);
  // For the trace: a bucket; a codec's tensors in it; a chunk of a part. (node_job_report.cc)
  TraceSubject Describe(const NodeBucket& bucket) const;
  TraceSubject Describe(const NodeBucket& bucket, const BucketCodec& codec) const;
  TraceSubject Describe(const NodeBucket& bucket, const BucketCodec& codec, const Part& part,
                        uint32_t chunk, uint64_t wire_bytes) const;
  // A round that was complete then, and has been returned now.
  void TraceRound(const TraceSubject& what, TimePoint first_submit, TimePoint ready_since,
                  TimePoint complete) const;
  // A result that was sent for at `sent` and decoded from `begin` until `end`.
  void TraceResult(const TraceSubject& what, TimePoint sent, TimePoint begin, TimePoint end) const;
  absl::Status StoppedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Hello spec_;  // of the worker that came first
  const LayeredTimeout timeout_;
  const TimePoint created_;
  NodeContext& context_;
  const JobTrace trace_;
  ShardGroup shards_;
  FoldPool pool_;         // used by the run thread
  FoldPool finish_pool_;  // used by the finish thread

  Mutex mutex_;
  CondVar changed_;         // anything but what run_changed_ is for
  CondVar run_changed_;     // a bucket is ready, or nobody runs any more, or the job has stopped
  CondVar finish_changed_;  // a part of a compressed bucket has come, or the job has stopped
  Device* device_ ABSL_GUARDED_BY(mutex_);  // that all buckets are on
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool gathered_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t chunk_bytes_ ABSL_GUARDED_BY(mutex_) = 0;     // once joined
  std::vector<Worker> workers_ ABSL_GUARDED_BY(mutex_);  // by local rank
  uint32_t num_here_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t num_left_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::shared_ptr<NodeBucket>> buckets_ ABSL_GUARDED_BY(mutex_);  // by index
  std::deque<std::shared_ptr<NodeBucket>> ready_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;  // somebody takes a bucket through its round
  // Codecs whose first, and whose later part is under way, in the order of sending.
  std::deque<Step> first_sent_ ABSL_GUARDED_BY(mutex_);
  std::deque<Step> later_sent_ ABSL_GUARDED_BY(mutex_);
  JobCompression compression_ ABSL_GUARDED_BY(mutex_);
  TimePoint last_progress_ ABSL_GUARDED_BY(mutex_);
  uint32_t num_in_flight_ ABSL_GUARDED_BY(mutex_) = 0;  // buckets
  TimePoint in_flight_since_ ABSL_GUARDED_BY(mutex_);   // any bucket

  Thread run_thread_;
  Thread finish_thread_;  // only when the codec compresses
  Thread monitor_thread_;
};

}  // namespace thalweg
