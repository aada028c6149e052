// One training job on one node: gathers the node's workers, joins the aggregators, and takes every
// bucket through its rounds. Here the parts of a job are put together:
//
//   Roster        the workers: who is here, who has left, and their outboxes
//   BucketTable   the buckets that they have announced (CodecStates: what codecs carry on)
//   ServedWeights the weights that shards keep of some of them
//   RoundRunner   the way of a bucket through its rounds
//   CollectiveRunner  the collectives of the workers' groups
//   PostOffice    the messages between their workers
//   Watchdog      deadlines and heartbeats
//   JobOutcome    whether the job goes on; when it does not, all of them are woken
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/thread.h"
#include "core/exchange/rounds.h"
#include "core/ipc/connection.h"
#include "core/ipc/message.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/bucket/bucket_table.h"
#include "server/sidecar/bucket/codec_states.h"
#include "server/sidecar/bucket/job_compression.h"
#include "server/sidecar/bucket/kept_buckets.h"
#include "server/sidecar/bucket/round_report.h"
#include "server/sidecar/bucket/round_runner.h"
#include "server/sidecar/bucket/served_weights.h"
#include "server/sidecar/collective/collective_runner.h"
#include "server/sidecar/job/job_outcome.h"
#include "server/sidecar/job/node_context.h"
#include "server/sidecar/job/progress.h"
#include "server/sidecar/letters/post_office.h"
#include "server/sidecar/watchdog.h"
#include "server/sidecar/workers/roster.h"

namespace thalweg {

// Thread-safe. Owns the threads. Fails as a whole: all workers and shards are told the first error.
class NodeJob : public std::enable_shared_from_this<NodeJob>,
                private RoundRunner::Listener,
                private CollectiveListener {
 public:
  // Shared: shards report to objects that refer to the job weakly. The job uses the shards, which
  // it does not own, until Stop has returned: the last reference to it may be one of theirs, which
  // must not release a shard.
  static std::shared_ptr<NodeJob> Start(const ipc::Hello& first,
                                        const ShardDirectory::JobShards& shards,
                                        NodeContext& context);

  // Takes a worker in. One that contradicts the job is refused, and fails the job while it gathers.
  // The connection is shared with the thread that reads from it; nobody else may send through it.
  absl::Status AddWorker(const ipc::Hello& hello, std::shared_ptr<Connection> connection);
  KeptBuckets& kept() { return kept_; }  // that workers bring along from an earlier process
  void OnRegisterBucket(uint32_t local_rank, const ipc::RegisterBucket& message, UniqueFd arena);
  void OnSubmit(uint32_t local_rank, const ipc::Submit& message);
  // The worker has sent a message, be it only a sign of life.
  void OnHeard(uint32_t local_rank) { roster_.Heard(local_rank, Now()); }
  void OnLossScale(double scale) { runner_.NoteLossScale(scale); }
  // Both fail the job when a round is in flight, or the state is not one of this job's.
  void OnGetCodecState(uint32_t local_rank);
  void OnCodecState(uint32_t local_rank, const ipc::CodecState& message, UniqueFd arena);
  // Fail the job when nobody can do that, for what reason ever.
  void OnSetSettings(uint32_t local_rank, const ipc::SetSettings& message);
  void OnGetSnapshots(uint32_t local_rank, const ipc::GetSnapshots& message);
  void OnGetWeights(uint32_t local_rank, const ipc::GetWeights& message);
  void OnWeights(uint32_t local_rank, const ipc::Weights& message, UniqueFd arena);
  // Tells one worker why the sidecar hangs up, and waits until that has been sent.
  void Refuse(uint32_t local_rank, const absl::Status& why);
  // The worker is gone, with OK when it said so itself.
  void WorkerLeft(uint32_t local_rank, const absl::Status& reason);
  // After WorkerLeft: lets go of the worker's memory, once nothing uses it any more.
  void ReleaseWorker(uint32_t local_rank);

  // What a worker says of its collectives. InvalidArgument: it, or another, contradicts itself.
  absl::Status OnMakeGroup(uint32_t local_rank, const ipc::MakeGroup& message);
  absl::Status OnShareArena(uint32_t local_rank, const ipc::ShareArena& message, UniqueFd fd) {
    return arenas_.Add(local_rank, message, std::move(fd));
  }
  void OnCollect(uint32_t local_rank, ipc::Collect message);
  void OnSend(uint32_t local_rank, ipc::Send message);
  void OnReceive(uint32_t local_rank, const ipc::Receive& message);
  absl::Status OnTaken(uint32_t local_rank, const ipc::Taken& message) {
    return message.group == 0 ? post_.Take(local_rank, message)
                              : collectives_.Take(local_rank, message);
  }

  void OnResult(uint32_t shard, const RoundResult& result);
  void Fail(const absl::Status& reason);

  // The last worker has left: the job is over, and to be stopped.
  bool IsFinished() const { return roster_.IsOver() && !outcome_.Check().ok(); }
  // Ends the threads, after the workers and shards have been told of a failure. Idempotent; must
  // come before the last reference goes, and not from an event.
  void Stop();
  JobFlights Flights(TimePoint now) const;

 private:
  NodeJob(const ipc::Hello& first, const ShardDirectory::JobShards& shards, NodeContext& context);

  void OnPlaced(const ipc::Placed& message) override { roster_.TellAll(message); }
  void OnComplete(const ipc::Complete& message) override;
  void OnFailed(const absl::Status& why) override { Fail(why); }
  void OnMessage(uint32_t local_rank, const ipc::Message& message, int fd) override {
    roster_.Tell(local_rank, message, fd);
  }
  void OnCollectiveFailed(const absl::Status& why) override { Fail(why); }
  std::function<void(uint32_t, const ipc::Message&)> Poster() override;

  void WakeAll();
  absl::Status ProbeGpu(const ipc::Hello& hello) const;
  void Run();
  void Monitor();
  void SendHeartbeats(uint32_t shard);
  // Shows that the worker and the job are alive while the worker's reader is busy.
  std::function<void()> AliveOf(uint32_t local_rank);

  const ipc::Hello spec_;  // of the worker that came first
  const Patience patience_;
  const TimePoint created_;
  const std::shared_ptr<const JobSigner> signer_;  // null: the job has no secret
  NodeContext& context_;

  JobOutcome outcome_;
  Progress progress_;
  RoundReport report_;
  ShardGroup shards_;
  JobCompression compression_;
  CodecStates states_;
  BucketTable buckets_;
  ServedWeights weights_;
  RoundRunner runner_;
  Arenas arenas_;
  CollectiveRunner collectives_;
  PostOffice post_;
  KeptBuckets kept_;
  Roster roster_;
  Watchdog watchdog_;

  Thread run_thread_;
  Thread finish_thread_;  // only when codecs have steps after the first
  Thread monitor_thread_;
  std::vector<Thread> heartbeat_threads_;  // one a shard, because it waits for the shard's answer
};

}  // namespace thalweg
