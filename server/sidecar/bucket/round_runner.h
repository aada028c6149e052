// The way of a job's buckets through their rounds, from the workers' submissions to the results.
//
//   readers' threads  Submit; the last worker's makes the bucket ready, and takes a small one
//                     through its round at once
//   run thread        RunLoop: per bucket, in the order in which they become ready, chunk by chunk
//                     with the fold threads' help: wait for the inputs → encode → contribute
//   shards' threads   OnResult: decode to where it belongs; the last chunk completes the bucket, or
//                     leaves a compressed one to
//   finish thread     FinishLoop: the steps of compression after the first
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/loss_scale.h"
#include "core/exchange/rounds.h"
#include "core/ipc/message.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/bucket/arena_gradient.h"
#include "server/sidecar/bucket/bucket_table.h"
#include "server/sidecar/bucket/codec_states.h"
#include "server/sidecar/bucket/in_order.h"
#include "server/sidecar/bucket/job_compression.h"
#include "server/sidecar/bucket/round_report.h"
#include "server/sidecar/bucket/step_queue.h"
#include "server/sidecar/bucket/turn_queue.h"
#include "server/sidecar/codec/fold_pool.h"
#include "server/sidecar/job/job_outcome.h"
#include "server/sidecar/job/progress.h"

namespace thalweg {

struct RoundTerms {
  uint32_t node = 0;
  uint32_t num_nodes = 1;
  uint32_t world_size = 1;
  LayeredTimeout timeout;
  uint32_t threads = 1;                    // that fold
  bool has_steps = false;                  // some codec has steps after its first part
  std::optional<uint32_t> own_shard = {};  // that the node hosts
};

// Thread-safe. Owns no threads but those that fold.
class RoundRunner {
 public:
  // Called without a lock, by any of the threads above; must not block.
  class Listener {
   public:
    virtual ~Listener() = default;
    // The shards know a whole bucket, whose first round begins.
    virtual void OnPlaced(const ipc::Placed& message) = 0;
    // The result of a round is where workers will find it.
    virtual void OnComplete(const ipc::Complete& message) = 0;
    // A round cannot go on.
    virtual void OnFailed(const absl::Status& why) = 0;
  };
  // The runner works with these parts; all must outlive it.
  struct Context {
    const JobOutcome& outcome;  // whoever changes it calls Wake
    Progress& progress;
    BucketTable& buckets;
    CodecStates& states;
    JobCompression& compression;
    ShardGroup& shards;
    const RoundReport& report;
  };
  RoundRunner(const RoundTerms& terms, const Context& context, InputTerms inputs,
              Listener& listener);

  // A worker has submitted a round. Errors as TurnQueue::Submit; InvalidArgument also for a bucket
  // that nobody has announced.
  absl::Status Submit(uint32_t local_rank, const ipc::Submit& message);
  // From now on gradients carry `scale`; rounds keep the one with which they have begun.
  void NoteLossScale(double scale) { loss_scale_ = scale; }
  void OnResult(uint32_t shard, const RoundResult& received);
  // Worker `name` has left. Returns Aborted when a round waits for it; no other will begin.
  absl::Status OnWorkerLeft(uint32_t local_rank, const std::string& name);
  // Waits until no bucket is on its way to the shards and no step is under way, or until
  // `deadline`.
  void WaitUntilIdle(TimePoint deadline);

  // Both return once the job does not go on. FinishLoop is needed only when the codecs have steps
  // after their first part.
  void RunLoop();
  void FinishLoop();
  void Wake();

 private:
  // Begins the round of a bucket whose turn it is, unless it has begun.
  absl::Status Begin(NodeBucket& bucket);
  // Takes a small bucket through its round, or leaves it to the run thread if that would have to
  // wait. Requires the turn.
  void RunAtOnce(const std::shared_ptr<NodeBucket>& bucket);
  // Sends the first part of each codec.
  absl::Status Exchange(const std::shared_ptr<NodeBucket>& bucket);
  // Asks the shards for the weights, instead.
  absl::Status Pull(const std::shared_ptr<NodeBucket>& bucket);
  absl::Status SendPart(const Step& step, FoldPool& pool);
  absl::Status Announce(const Step& step);
  // Nodes would wait for each other if they sent chunks in different orders, so `order` has the
  // part's, whichever thread is first with one.
  absl::Status SendChunk(const Step& step, uint32_t chunk, InOrder& order);
  // Takes the place of SendChunk on a node that is alone, unless a shard keeps the weights.
  absl::Status ReduceChunk(const Step& step, uint32_t chunk);
  absl::Status TakeStep(const Step& step);
  absl::Status Decode(const RoundResult& received, Step& step, TimePoint& sent);
  // The codec has its result, with the step's part.
  void FinishCodec(const Step& step);
  // All codecs have their results.
  void Complete(NodeBucket& bucket);

  const RoundTerms terms_;
  const Context context_;
  const InputTerms inputs_;
  Listener& listener_;
  std::atomic<double> loss_scale_{kUnknownLossScale};
  TurnQueue turns_;
  StepQueue steps_;
  FoldPool pool_;         // used by whoever has the turn
  FoldPool finish_pool_;  // used by the finish thread
};

}  // namespace thalweg
