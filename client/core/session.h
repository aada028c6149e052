// A worker's connection to its node's sidecar. Knows no framework: client/torch adapts it to
// PyTorch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/codec_policy.h"
#include "core/base/gradient_path.h"
#include "core/base/layout.h"
#include "core/base/protocol.h"
#include "core/base/trace.h"
#include "core/device/device_runtime.h"

namespace thalweg {

struct SessionOptions {
  std::string sidecar_path;  // Unix socket
  std::string job;           // unique among the jobs that the sidecar and the aggregators serve
  uint32_t rank = 0;         // of this worker in the job
  uint32_t world_size = 1;
  uint32_t node = 0;  // of this node in the job; order of summation
  uint32_t num_nodes = 1;
  std::string node_name;
  uint32_t local_rank = 0;  // among this node's workers; order of summation
  uint32_t local_size = 1;
  CodecPolicy codec;
  uint64_t chunk_bytes = 0;                     // 0: chosen from what the links carry
  Duration timeout = std::chrono::seconds(30);  // of every wait
  // Whose memory the gradients are in; null: the host's. Shared with what is queued on it.
  std::shared_ptr<DeviceRuntime> device = nullptr;
  std::shared_ptr<TraceWriter> trace = nullptr;  // null: nothing is traced
};

// A bucket's gradient in a device's memory.
struct DeviceGradient {
  std::span<std::byte> bytes;         // the result comes back to the same place
  DeviceStream producer = nullptr;    // the gradient is there when it has done its work so far
  std::shared_ptr<const void> owner;  // keeps the memory; let go of when nothing uses it any more
};

// The mean over all workers of the job, in the bucket's own type.
struct ReducedBucket {
  std::span<const std::byte> bytes;
  // Keeps `bytes` mapped. They are overwritten by the bucket's next round, read-only, and the same
  // memory for all workers of the node.
  std::shared_ptr<const void> owner;
  // Of a DeviceGradient: `bytes` are its own, and hold the result for streams that have been made
  // to wait for this event during the call of `done`.
  DeviceEvent arrived = nullptr;
};

// Sums since the session began; times in seconds.
struct SessionStats {
  uint64_t rounds = 0;               // buckets reduced
  uint64_t raw_bytes = 0;            // gradient bytes that this worker handed over
  uint64_t wire_bytes_sent = 0;      // payload bytes that the node sent for those buckets
  uint64_t wire_bytes_received = 0;  // payload bytes that the node got back
  uint64_t nonfinite_elems = 0;      // NaN and infinities among the results
  double copy_seconds = 0;           // copying gradients into the arena, or having it done
  double reduce_seconds = 0;         // node: folding and encoding
  double wait_seconds = 0;           // node: waiting for its own workers
  double wire_seconds = 0;           // node: from first chunk sent to last result decoded
  double decode_seconds = 0;         // node: decoding results, all threads together
  double total_seconds = 0;          // worker: from Submit to completion
  // Not sums, but how things stand on this node.
  uint64_t compressed_since = 0;  // the iteration, from 1, in which compression began; 0: not yet
  double residual_norm = 0;       // of what compression has left for later
  double error_ratio = 0;         // that, in proportion to the norm of what was to be sent
  double loss_scale = 0;          // as NotePrecision was told last; 0: never
  uint64_t skipped_steps = 0;     // a sum: all that NotePrecision was told of
  GradientPath path = GradientPath::kCpu;
};

// Thread-safe. After a fork the child must not use it, and its destructor does nothing there.
class Session {
 public:
  // Called once per Submit, on the session's completion thread, on which no other work of the
  // session depends. Must not call Close() or destroy the session.
  using Done = std::function<void(absl::StatusOr<ReducedBucket>)>;

  // Connects and waits until all workers of the job have. Errors name what is missing or differs.
  // With a device, it must be the calling thread's current one.
  static absl::StatusOr<std::unique_ptr<Session>> Connect(const SessionOptions& options);

  virtual ~Session() = default;  // closes

  // Announces a bucket (again, with the next generation, when its layout has changed). Does not
  // wait for the other workers: a disagreement fails the session.
  virtual absl::Status RegisterBucket(BucketId id, const BucketLayout& layout) = 0;

  // Hands over one bucket's gradient (layout.Elems() elements), which is copied, and encoded for a
  // node's only worker, before this returns. All workers must submit the same buckets in the same
  // order. A bucket's next Submit must come after its previous `done`.
  virtual void Submit(BucketId id, std::span<const std::byte> gradient, Done done) = 0;

  // The same for a session with a device, and only there. The calling thread's current device must
  // be the session's, here and in RegisterBucket. Nothing waits for the device: neither this, nor
  // `done`, which is called when the result is on its way to the gradient's memory.
  virtual void SubmitFromDevice(BucketId id, DeviceGradient gradient, Done done) = 0;

  // Submits and waits for the outcome, which takes a thread switch less than waiting for `done`.
  virtual absl::StatusOr<ReducedBucket> Reduce(BucketId id,
                                               std::span<const std::byte> gradient) = 0;

  // OK, or why the session has failed; then every later Submit fails with it at once.
  // What the codec carries from round to round on this node, for a checkpoint: calls `use` with the
  // bytes, which are gone afterwards. Blocks. FailedPrecondition while a round is in flight.
  virtual absl::Status SaveCodecState(
      const std::function<void(std::span<const std::byte>)>& use) = 0;
  // Puts a saved state in its place, before the next round. One worker per node does that; if the
  // state does not fit, the job fails. FailedPrecondition while a round is in flight.
  virtual absl::Status LoadCodecState(std::span<const std::byte> state) = 0;

  // What loss scaling has come to, for the sidecar's metrics and stats(): the scale from now on,
  // and steps skipped since the last call. At most once a step; says nothing where nothing has
  // changed, and once the session has failed. Of a node's workers only the first one's matters to
  // others.
  virtual void NotePrecision(double loss_scale, uint64_t skipped_steps) = 0;

  // As in SessionOptions.
  virtual std::shared_ptr<DeviceRuntime> device() const = 0;
  virtual absl::Status status() const = 0;
  virtual SessionStats stats() const = 0;

  // Leaves the job. Buckets in flight fail. Copies that are queued on the device get `timeout` to
  // be done; what they use is left behind otherwise. Idempotent.
  virtual void Close() = 0;
};

}  // namespace thalweg
