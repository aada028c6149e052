// A Device determines where a node's gradients lie and are processed. The sidecar is independent of
// its kind: a device makes the memory of a bucket, and that makes the codecs that work on it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/codec_spec.h"
#include "core/base/dtype.h"
#include "core/base/layout.h"
#include "core/base/unique_fd.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/device_memory.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/codec/tensor_set.h"

namespace thalweg {

struct MemoryTerms {
  BucketId id;
  BucketLayout layout;
  DType share = DType::kFloat32;  // type of the workers' shares
  uint32_t local_size = 1;
  Duration patience{};   // limit for queued work of a device
  std::string job = {};  // buckets of different jobs share nothing
};

// A BucketMemory is a bucket's memory on one node: the shares of its workers, and the result.
// Inputs are added by one thread at a time, before the first round that needs them. The thread that
// begins a round, and the one that ends it, use the memory alone; in between it belongs to the
// codecs.
class BucketMemory {
 public:
  virtual ~BucketMemory() = default;

  // Registers where worker `local_rank` will put its share: an arena, or memory of a GPU.
  // InvalidArgument: it is not what is expected.
  virtual absl::Status AddInput(uint32_t local_rank, UniqueFd fd, const DeviceMemory& memory) = 0;
  virtual bool HasInput(uint32_t local_rank) const = 0;
  // Waits until that worker has put `chunks` chunks there, or until `deadline`. Returns how many
  // there are; work queued from now on sees them. Thread-safe.
  virtual uint32_t WaitInput(uint32_t local_rank, uint32_t chunks, TimePoint deadline) const = 0;
  // Returns the error that a device has met in queued work, after which no share arrives any more.
  // Does not wait. Thread-safe.
  virtual absl::Status Check() const { return absl::OkStatus(); }
  // Releases the memory of a worker that has left, or that has announced another layout, when no
  // round will come. May wait for a device; if that takes too long the memory stays as it is.
  virtual void DropInput(uint32_t /*local_rank*/) {}
  // Returns the shares from element `begin` on, by local rank: addresses on the device.
  virtual std::vector<const void*> Shares(uint64_t begin) const = 0;

  // Returns what workers map: its counter says how far a round has come, and in host memory it
  // contains the result.
  virtual BucketArena& result() = 0;
  virtual const BucketArena& result() const = 0;
  // Returns where else the result lies for that worker.
  virtual DeviceMemory ResultFor(uint32_t /*local_rank*/) const { return {}; }

  // Is called when all workers have submitted: their shares are there, or will be in the order of
  // their events.
  virtual absl::Status BeginRound() = 0;
  // Is called when all codecs have decoded their results: workers see the result in the order of
  // its event.
  virtual absl::Status EndRound() { return absl::OkStatus(); }

  // These make the codecs of server/sidecar/bucket/make_codecs.h for this memory, which must
  // outlive them. Part 0 is the whole bucket.
  virtual std::unique_ptr<DenseCodec> MakeCast(TensorSet tensors, const CodecPlace& place,
                                               uint32_t number, DType wire) = 0;
  virtual absl::StatusOr<std::unique_ptr<BucketCodec>> MakeLossy(TensorSet tensors,
                                                                 const CodecPlace& place,
                                                                 uint32_t number,
                                                                 const CodecSpec& spec,
                                                                 ParameterStates& states) = 0;
  // Returns null when no tensor shrinks enough.
  virtual absl::StatusOr<std::unique_ptr<BucketCodec>> MakePowerSgd(TensorSet tensors,
                                                                    const CodecPlace& place,
                                                                    uint32_t number, DType dense,
                                                                    const CodecSpec& spec,
                                                                    ParameterStates& states) = 0;
};

// Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  // Tests whether it can work on memory that a worker shares, of which `probe` is some; returns OK,
  // or why not. May wait for a few seconds.
  virtual absl::Status Probe(const DeviceMemory& probe) = 0;

  virtual absl::StatusOr<std::unique_ptr<BucketMemory>> MakeMemory(const MemoryTerms& terms) = 0;
};

}  // namespace thalweg
