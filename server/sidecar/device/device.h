// Where a node's gradients lie and are worked on. The sidecar does not know which kind it has: a
// device makes the memory of a bucket, and that makes the codecs that work on it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/codec_spec.h"
#include "core/base/dtype.h"
#include "core/base/layout.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/device_memory.h"
#include "core/ipc/unique_fd.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/codec/tensor_set.h"

namespace thalweg {

struct MemoryTerms {
  BucketId id;
  BucketLayout layout;
  DType share = DType::kFloat32;  // of what workers hand over
  uint32_t local_size = 1;
  Duration patience{};  // how long a device may take for what is queued on it
};

// A bucket's memory on one node: the shares of its workers, and the result. Guarded like the
// NodeBucket that it belongs to, but for what codecs do with it while a round is in flight.
class BucketMemory {
 public:
  virtual ~BucketMemory() = default;

  // Where worker `local_rank` will put its share: an arena, or memory of a GPU. InvalidArgument:
  // not what is expected.
  virtual absl::Status AddInput(uint32_t local_rank, UniqueFd fd, const DeviceMemory& memory) = 0;
  virtual bool HasInput(uint32_t local_rank) const = 0;
  // Waits until that worker has put `chunks` chunks there, or until `deadline`. Returns how many
  // there are: what is queued from now on finds them. Thread-safe.
  virtual uint32_t WaitInput(uint32_t local_rank, uint32_t chunks, TimePoint deadline) const = 0;
  // That worker has left and no round will come: lets go of its memory. May wait for a device; if
  // that takes too long the memory stays as it is.
  virtual void DropInput(uint32_t /*local_rank*/) {}
  // The shares from element `begin` on, by local rank: addresses on the device.
  virtual std::vector<const void*> Shares(uint64_t begin) const = 0;

  // What workers map: its counter says how far a round has come, and in host memory the result
  // lies in it.
  virtual BucketArena& result() = 0;
  virtual const BucketArena& result() const = 0;
  // Where else the result lies for that worker.
  virtual DeviceMemory ResultFor(uint32_t /*local_rank*/) const { return {}; }

  // All workers have submitted: their shares are there, or will be in the order of their events.
  virtual absl::Status BeginRound() = 0;
  // All codecs have decoded their results: workers will find the result in the order of its event.
  virtual absl::Status EndRound() { return absl::OkStatus(); }

  // The codecs of server/sidecar/codec/make_codecs.h, for this memory; it must outlive them.
  // Part 0 is the whole bucket.
  virtual std::unique_ptr<DenseCodec> MakeCast(TensorSet tensors, const CodecPlace& place,
                                               uint32_t number, DType wire) = 0;
  virtual absl::StatusOr<std::unique_ptr<BucketCodec>> MakeLossy(TensorSet tensors,
                                                                 const CodecPlace& place,
                                                                 uint32_t number,
                                                                 const CodecSpec& spec,
                                                                 ParameterStates& states) = 0;
  // Null when none of the tensors has enough to gain.
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

  // Whether it can work on memory that a worker shares, of which `probe` is some: tries it out. OK,
  // or why not. May wait for a few seconds.
  virtual absl::Status Probe(const DeviceMemory& probe) = 0;

  virtual absl::StatusOr<std::unique_ptr<BucketMemory>> MakeMemory(const MemoryTerms& terms) = 0;
};

}  // namespace thalweg
