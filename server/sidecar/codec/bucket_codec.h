// A BucketCodec is one codec with its tensors of one bucket, on one node. It sends parts of the
// bucket (server/sidecar/codec/part.h): a shard sums each of them and is independent of codecs.
//
//   Begin ─▶ part ─▶ Encode each chunk ─▶ shards ─▶ Decode each result ─┬─▶ the result is there
//                       ▲                                               │   (EndsWith)
//                       └──────── another part ◀──── Next ◀─────────────┘
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/layout.h"
#include "core/exchange/rounds.h"
#include "server/sidecar/codec/codec_place.h"
#include "server/sidecar/codec/compression_loss.h"
#include "server/sidecar/codec/fold_pool.h"
#include "server/sidecar/codec/gradient.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/codec/part.h"
#include "server/sidecar/codec/tensor_set.h"

namespace thalweg {

// Traffic counts the payload bytes of this node in one round.
struct Traffic {
  uint64_t sent = 0;
  uint64_t received = 0;
};

// The thread that runs a step of the round calls Begin, Encode, Decode and Next: what they use
// belongs to the round while it runs. CodecStates guards SaveStates and shard residuals; the mutex
// of the NodeBucket guards parts, traffic and CountRound.
class BucketCodec {
 public:
  BucketCodec(TensorSet tensors, const CodecPlace& place)
      : tensors_(std::move(tensors)), place_(place) {}
  virtual ~BucketCodec() = default;
  BucketCodec(const BucketCodec&) = delete;
  BucketCodec& operator=(const BucketCodec&) = delete;

  const TensorSet& tensors() const { return tensors_; }
  // Returns "fp16", "powersgd", ….
  virtual std::string name() const = 0;
  // Returns whether the bucket's next round may use this codec.
  virtual bool HasStarted() const { return true; }
  // Reports that a round of the bucket is over, whichever codec it used.
  virtual void CountRound() {}
  // Returns the rounds that have been counted; 0 if this codec does not use the count.
  virtual uint64_t rounds() const { return 0; }

  // Returns null for a part that is not this codec's.
  virtual Part* FindPart(uint32_t number) = 0;

  // Before Begin: converts residuals to the units of a round whose gradients carry `loss_scale`.
  // May wait for a device.
  absl::Status FollowLossScale(double loss_scale);
  // Between that and Begin: sets aside what earlier rounds have left of tensors that are `unused`,
  // by number in the bucket, so that the round sends nothing of it: their results may be discarded.
  // ReturnResiduals, when the round is over, adds it again. May wait for a device.
  absl::Status WithholdResiduals(const std::vector<bool>& unused);
  absl::Status ReturnResiduals();
  // Computes what a round needs before anything can be sent, and returns the first part to send.
  virtual absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) = 0;
  // Returns the node's share of a chunk of the part in flight; waits for the gradient if necessary.
  // Must be called once for each chunk of a round, by any thread; the bytes stay in place until the
  // round is over.
  virtual absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                            Gradient& gradient) = 0;
  // Takes the result of a chunk of the part in flight. InvalidArgument when it cannot be decoded.
  virtual absl::Status Decode(const Part& part, const RoundResult& received) = 0;
  // Returns whether the result is complete with this part, without Next.
  virtual bool EndsWith(const Part& part) const = 0;
  // Is called when the part in flight has arrived, unless EndsWith; returns the next part to send,
  // or null when the result is complete.
  virtual absl::StatusOr<Part*> Next(FoldPool& pool, Gradient& gradient) = 0;

  // Returns whether Next, called after this part, may return another one to send.
  virtual bool MayFollow(const Part& /*part*/) const { return false; }

  // These are for the round that is over.
  virtual uint64_t nonfinite_elems() const = 0;
  virtual bool gave_up() const { return false; }
  // Returns the loss of the last sampled round: the first round is sampled, and then one in
  // kSampleEvery.
  virtual CompressionLoss loss() const { return {}; }

  // Returns by tensor; null for one without a state.
  virtual std::span<const std::shared_ptr<ParameterState>> States() const { return {}; }
  // The next round makes the residuals that it leaves in these places, by tensor, and the states
  // keep what they have: when the round is over, the caller makes them lie there. A place may be
  // where a residual lies already. Only for gradients in host memory. Before Begin.
  void MakeResidualsIn(std::vector<std::span<float>> places) { places_ = std::move(places); }
  // Copies a device's states to the host, from where the next round takes them again. Not while a
  // round's parts are in flight. May wait for the device.
  virtual absl::Status SaveStates() { return absl::OkStatus(); }

  // Returns the part of which shards keep residuals; null if they lose nothing. For a checkpoint
  // the caller sets those residuals here, to be saved with the rest of the state, and sends loaded
  // ones to the shards; a chunk without a residual gives an empty vector.
  virtual const Part* PartWithShardResiduals() const { return nullptr; }
  virtual void KeepShardResidual(uint32_t /*chunk*/, std::span<const float> /*residual*/) {}
  virtual std::vector<float> ShardResidual(uint32_t /*chunk*/) const { return {}; }
  virtual void ForgetShardResiduals() {}
  // Sets zeros for the tensors for which none is here, so that shards drop what they have.
  virtual void ZeroShardResiduals() {}
  // Returns whether such residuals are here: set or loaded, and not forgotten since.
  virtual bool keeps_shard_residuals() const { return false; }

  Traffic traffic;  // of the round in flight, or of the last one

 protected:
  static constexpr uint64_t kSampleEvery = 100;

  // Lets `decode` write the elements of the set from `begin` on, the first of which is no padding,
  // in the bucket's type, to their place in the result.
  absl::Status Scatter(uint64_t begin, uint64_t elems,
                       const std::function<absl::Status(std::byte*)>& decode) const;

  // Returns where a round leaves a tensor's residual.
  std::span<float> NextResidual(size_t tensor) const {
    return places_.empty() ? std::span<float>(States()[tensor]->residual) : places_[tensor];
  }

  // Makes a part that represents `raw_bytes` of the tensors.
  Part MakePart(uint32_t number, BucketLayout layout, WireFormat wire, uint64_t raw_bytes) const {
    BucketId id = place_.bucket;
    id.part = number;
    Part part(id, std::move(layout), wire, place_.chunk_bytes, place_.num_shards);
    part.bucket.raw_bytes = raw_bytes;
    return part;
  }

  const TensorSet tensors_;
  const CodecPlace place_;

 private:
  std::vector<std::pair<size_t, std::vector<float>>> withheld_;  // by tensor of the set
  std::vector<std::span<float>> places_;  // of the next residuals, by tensor; empty: as they are
};

}  // namespace thalweg
