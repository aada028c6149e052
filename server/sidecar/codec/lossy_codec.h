// Gradients that cross the network chunk by chunk in a lossy format (docs/codecs.md), with error
// feedback: what a chunk loses is added to the next gradient. What is the same wherever they lie.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/base/codec_spec.h"
#include "core/base/wire_format.h"
#include "kernels/codec/lossy.h"
#include "server/sidecar/codec/one_part_codec.h"
#include "server/sidecar/codec/parameter_states.h"

namespace thalweg {

class LossyCodec : public OnePartCodec {
 public:
  std::string name() const final { return spec_.Name(); }
  bool HasStarted() const final;
  void CountRound() final;
  uint64_t rounds() const final { return states_.empty() ? 0 : states_[0]->rounds; }
  const Part* PartWithShardResiduals() const final;
  void KeepShardResidual(uint32_t chunk, std::span<const float> residual) final;
  std::vector<float> ShardResidual(uint32_t chunk) const final;
  void ForgetShardResiduals() final;
  void ZeroShardResiduals() final;
  bool keeps_shard_residuals() const final;
  std::span<const std::shared_ptr<ParameterState>> States() const final { return states_; }
  // Also what no shard sees: finite means that are too large for the bucket's type.
  uint64_t nonfinite_elems() const final {
    return OnePartCodec::nonfinite_elems() + overflow_.load();
  }

 protected:
  // Sends the tensors as part `number`. In a format with blocks each tensor begins with a block: no
  // other tensor has a say in its scales. So chunks and tiles of whole blocks begin with an element
  // of a tensor. The padding is zero and has no residual; what it decodes to is dropped.
  LossyCodec(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec);

  // To be called once. InvalidArgument names a tensor whose state, which somebody has loaded, is of
  // another size.
  absl::Status TakeStates(ParameterStates& states);

  // The first is called when a round begins; the second for each result that has been decoded, by
  // any thread.
  void ForgetOverflow() { overflow_ = 0; }
  void NoteOverflow(const RoundResult& result) {
    overflow_ += CountOverflow(result.payload, format_, tensors_.layout().dtype, result.elems);
  }

  // Returns the offset of each chunk in a memory that has room for all, and then its size.
  const std::vector<uint64_t>& encoded_begins() const { return encoded_begins_; }
  bool IsSampled() const { return part_.round % kSampleEvery == 1; }  // rounds count from 1

  const CodecSpec spec_;
  const WireFormat format_;
  std::vector<std::shared_ptr<ParameterState>> states_;  // by tensor

 private:
  std::vector<uint64_t> encoded_begins_;
  std::atomic<uint64_t> overflow_{0};
};

}  // namespace thalweg
