// Session is a worker's connection to its node's sidecar. It is independent of frameworks;
// client/torch adapts it to PyTorch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/collective_call.h"
#include "client/core/gradients.h"
#include "client/core/session_options.h"
#include "client/core/session_stats.h"
#include "core/base/layout.h"
#include "core/base/protocol.h"
#include "core/base/snapshots.h"
#include "core/base/update.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// A Session is thread-safe. After a fork the child must not use it, and its destructor does nothing
// there.
class Session {
 public:
  // A Done is called once per Submit, on the session's completion thread; no other work of the
  // session depends on that thread. It must neither call Close() nor destroy the session, and may
  // wait for what it begins itself: that completes on another thread.
  using Done = std::function<void(absl::StatusOr<ReducedBucket>)>;
  // What a worker says of one round of a bucket.
  struct Notes {
    // Numbers of the layout's tensors that took no part in the backward pass on this worker. Their
    // gradients are zero, and their results are discarded if they took part nowhere: a codec keeps
    // what it has left out of them so far.
    std::vector<uint32_t> unused = {};
    uint64_t settings = 0;   // of the update that the round does; 0: it does none
    uint64_t waited_ns = 0;  // for which this worker waited for a served bucket's last weights
  };

  // Connects and waits until all workers of the job have connected. Errors name what is missing or
  // differs. With a device, the device must be the calling thread's current one.
  static absl::StatusOr<std::unique_ptr<Session>> Connect(const SessionOptions& options);

  virtual ~Session() = default;  // calls Close

  // Announces a bucket; when its layout has changed, again with the next generation. Does not wait
  // for the other workers: a disagreement fails the session.
  virtual absl::Status RegisterBucket(BucketId id, const BucketLayout& layout) = 0;
  // Announces a served bucket: shards keep its weights and update them, and its rounds' results are
  // their new values, rounded to update.down and then to the bucket's own type. All workers
  // announce these in the same order, with generation 0 only.
  virtual absl::Status RegisterServedBucket(BucketId id, const BucketLayout& layout,
                                            const UpdateRule& update) = 0;
  // Numbers settings, from 1, for later rounds. Workers that differ fail the session. Never waits.
  virtual absl::Status SetSettings(uint64_t number, const UpdateStep& step) = 0;
  // Read or replace a slice (core/base/update.h) of a served bucket's weights, as a whole: as many
  // values as the bucket has elements, or none. Block. One worker of the job writes them, before
  // the first Submit of all. FailedPrecondition, which fails the session: a round is in flight.
  virtual absl::StatusOr<WeightsSlice> ReadWeights(BucketId id, uint32_t slice) = 0;
  virtual absl::Status WriteWeights(BucketId id, uint32_t slice, std::span<const float> values,
                                    uint64_t steps) = 0;

  // Asks the shards about snapshots of what they keep, and waits for all; a shard that cannot do it
  // fails the session. The first worker calls it, before its first Submit of a step.
  virtual absl::StatusOr<SnapshotReport> Snapshots(SnapshotAction action, SnapshotId id) = 0;

  // Submits one bucket's gradient (layout.Elems() elements). It is copied (and, for a node's only
  // worker, encoded) before this returns. All workers must submit the same buckets in the same
  // order. A bucket's next Submit must come after its previous `done`.
  virtual void Submit(BucketId id, std::span<const std::byte> gradient, Notes notes, Done done) = 0;

  // Submits a gradient of a session with a device, and only of such a session. The calling thread's
  // current device must be the session's, here and in RegisterBucket. Nothing waits for the device:
  // neither this call nor `done`, which is called when the result is on its way to the gradient's
  // memory.
  virtual void SubmitFromDevice(BucketId id, DeviceGradient gradient, Notes notes, Done done) = 0;

  // Does UpdateRound::kPull on a served bucket whose update commits, after its Submit has given the
  // squares, with these settings; or kMeasure, before. The rest is as for Submit.
  virtual void Pull(BucketId id, uint64_t settings, Done done) = 0;
  virtual void Measure(BucketId id, uint64_t settings, Done done) = 0;

  // Submits and waits for the outcome, with one thread switch less than waiting for `done`.
  virtual absl::StatusOr<ReducedBucket> Reduce(BucketId id,
                                               std::span<const std::byte> gradient) = 0;

  // Saves, for a checkpoint, what the codec carries from round to round on this node: calls `use`
  // with the bytes, which are invalid afterwards. Blocks. FailedPrecondition while a round is in
  // flight.
  virtual absl::Status SaveCodecState(
      const std::function<void(std::span<const std::byte>)>& use) = 0;
  // Puts a saved state in its place, before the next round. One worker per node does that; if the
  // state does not fit, the job fails. FailedPrecondition while a round is in flight.
  virtual absl::Status LoadCodecState(std::span<const std::byte> state) = 0;

  // Reports loss scaling for codecs' residuals, metrics and stats(): the scale that gradients carry
  // from now on, and the steps skipped since the last call. Does nothing when nothing has changed
  // or the session has failed. The sidecar only hears it from the first worker of a node.
  virtual void NotePrecision(double loss_scale, uint64_t skipped_steps) = 0;

  // Makes a group of workers known, before its first collective. Does not wait for the others: a
  // disagreement fails the session.
  virtual absl::Status MakeGroup(const WorkerGroup& group) = 0;
  // Takes part in a collective; a group's collectives begin in the order of these calls, on all its
  // workers alike. What the call gives is copied before this returns; what it gets must stay until
  // `done` is called, once, on the completion thread or, if the session has been closed, at once.
  virtual void Collect(CollectiveCall call, std::function<void(absl::Status)> done) = 0;
  // Sends to one other worker of a group, or receives. A send is done when its values are on their
  // way, or have arrived; the rest is as for Collect.
  virtual void Exchange(PeerCall call, std::function<void(absl::Status)> done) = 0;

  // Returns the completion thread on which the end of what this thread begins now is told.
  virtual int CompletionThreadHere() const = 0;
  // This thread is about to wait for such an end. If it is that completion thread, another one
  // tells ends from now on: callbacks may wait for each other. FailedPrecondition: in a forked
  // child no end is ever told.
  virtual absl::Status BeforeWait(int completion_thread) = 0;
  // Returns whether this is a completion thread: one of those that Close waits for.
  virtual bool IsCompletionThread() const = 0;

  virtual const std::string& job() const = 0;
  virtual std::shared_ptr<DeviceRuntime> device() const = 0;  // of SessionOptions
  virtual absl::Status status() const = 0;                    // OK, or why the session has failed
  virtual SessionStats stats() const = 0;                     // since Connect

  // Leaves the job. Buckets in flight fail. Copies that are queued on the device get `timeout` to
  // be done; what they use is left behind otherwise. Idempotent.
  virtual void Close() = 0;
  // Fails the job for all its workers at once, whatever they wait for; and what is in flight here.
  // The others hear that this worker is gone: "it has aborted the job".
  virtual void Abort(const std::string& why) = 0;
};

}  // namespace thalweg
