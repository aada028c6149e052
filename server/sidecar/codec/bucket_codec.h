// One codec at work on its tensors of one bucket, on one node. What it sends are parts of the
// bucket (server/sidecar/part.h): a shard sums each of them and knows nothing of codecs.
//
//   Begin ─▶ part ─▶ Encode each chunk ─▶ shards ─▶ Decode each result ─┬─▶ the result is there
//                       ▲                                               │   (EndsWith)
//                       └──────── another part ◀──── Next ◀─────────────┘
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "core/base/layout.h"
#include "server/sidecar/codec/gradient.h"
#include "server/sidecar/codec/tensor_set.h"
#include "server/sidecar/fold_pool.h"
#include "server/sidecar/part.h"

namespace thalweg {

// Of one bucket; what all its codecs have in common on this node.
struct CodecPlace {
  BucketId bucket;
  uint64_t chunk_bytes = 0;
  uint32_t num_shards = 1;
  bool is_alone = false;  // the only node: nothing is sent
  // The whole bucket's, in its own type; null when it is not in host memory.
  std::byte* result = nullptr;
};

// What a round of compression did not get across, as squared norms.
struct CompressionLoss {
  double residual = 0;  // what is left for later
  double whole = 0;     // what was to be sent

  CompressionLoss& operator+=(const CompressionLoss& other) {
    residual += other.residual;
    whole += other.whole;
    return *this;
  }
};

// ‖residual‖ / ‖whole‖; 0 when nothing was to be sent.
inline double ErrorRatio(const CompressionLoss& loss) {
  return loss.whole > 0 ? std::sqrt(loss.residual / loss.whole) : 0;
}

// Payload bytes of this node in one round.
struct Traffic {
  uint64_t sent = 0;
  uint64_t received = 0;
};

// Guarded like the NodeBucket that it belongs to, but for Begin, Encode, Decode and Next: while a
// round is in flight, what they touch belongs to it.
class BucketCodec {
 public:
  BucketCodec(TensorSet tensors, const CodecPlace& place)
      : tensors_(std::move(tensors)), place_(place) {}
  virtual ~BucketCodec() = default;
  BucketCodec(const BucketCodec&) = delete;
  BucketCodec& operator=(const BucketCodec&) = delete;

  const TensorSet& tensors() const { return tensors_; }
  // "fp16", "powersgd".
  virtual std::string name() const = 0;
  // Whether the bucket's next round may go through this codec.
  virtual bool HasStarted() const { return true; }
  // A round of the bucket is over, through whatever codec.
  virtual void CountRound() {}
  // Rounds that have been counted; 0 if this codec does not care.
  virtual uint64_t rounds() const { return 0; }

  // Null for a part that is not this codec's.
  virtual Part* FindPart(uint32_t number) = 0;

  // Computes what a round needs before anything can be sent, and says what to send first.
  virtual absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) = 0;
  // The node's share of a chunk of the part in flight, after waiting for the gradient if need be.
  // Each chunk once in a round, by any thread; the bytes keep their place until the round is over.
  virtual absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                            Gradient& gradient) = 0;
  // Takes the result of a chunk of the part in flight. InvalidArgument when it cannot be decoded.
  virtual absl::Status Decode(const Part& part, const RoundResult& received) = 0;
  // Whether the result is complete with this part, without Next.
  virtual bool EndsWith(const Part& part) const = 0;
  // After the part in flight has come, unless EndsWith: the next one to send, or null when the
  // result is complete.
  virtual absl::StatusOr<Part*> Next(FoldPool& pool, Gradient& gradient) = 0;

  // Of the round that is over.
  virtual uint64_t nonfinite_elems() const = 0;
  virtual bool gave_up() const { return false; }
  // Of the last round that was sampled: the first one, and then one in kSampleEvery.
  virtual CompressionLoss loss() const { return {}; }

  // No round is in flight: brings what a device keeps of the states to the states, from where the
  // next round takes it again. May wait for the device.
  virtual absl::Status SaveStates() { return absl::OkStatus(); }

  // The part of which shards keep residuals; null: they lose nothing. For a checkpoint the caller
  // brings those residuals here, to be saved with the rest of the state, and brings loaded ones to
  // the shards; a chunk without any gives an empty vector.
  virtual const Part* PartWithShardResiduals() const { return nullptr; }
  virtual void KeepShardResidual(uint32_t /*chunk*/, std::span<const float> /*residual*/) {}
  virtual std::vector<float> ShardResidual(uint32_t /*chunk*/) const { return {}; }
  virtual void ForgetShardResiduals() {}

  Traffic traffic;  // of the round in flight, or the last one

 protected:
  static constexpr uint64_t kSampleEvery = 100;

  // Lets `decode` write the elements of the set from `begin` on, in the bucket's type, to where
  // they belong in the result.
  absl::Status Scatter(uint64_t begin, uint64_t elems,
                       const std::function<absl::Status(std::byte*)>& decode) const;

  // One that stands for `raw_bytes` of the tensors.
  Part MakePart(uint32_t number, BucketLayout layout, WireFormat wire, uint64_t raw_bytes) const {
    BucketId id = place_.bucket;
    id.part = number;
    Part part(id, std::move(layout), wire, place_.chunk_bytes, place_.num_shards);
    part.bucket.raw_bytes = raw_bytes;
    return part;
  }

  const TensorSet tensors_;
  const CodecPlace place_;
};

}  // namespace thalweg
