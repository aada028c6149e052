// Gradients that cross the network chunk by chunk in a lossy format (docs/codecs.md), with error
// feedback: what a chunk loses is added to the next gradient.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/codec_spec.h"
#include "core/base/wire_format.h"
#include "kernels/codec/encoded.h"
#include "server/sidecar/codec/one_part_codec.h"
#include "server/sidecar/codec/parameter_states.h"

namespace thalweg {

class LossyCodec final : public OnePartCodec {
 public:
  // Sends the tensors as part `number`. InvalidArgument names a tensor whose state, which somebody
  // has loaded, is of another size.
  static absl::StatusOr<std::unique_ptr<LossyCodec>> Create(TensorSet tensors,
                                                            const CodecPlace& place,
                                                            uint32_t number, const CodecSpec& spec,
                                                            ParameterStates& states);

  std::string name() const override { return spec_.Name(); }
  bool HasStarted() const override;
  void CountRound() override;
  uint64_t rounds() const override { return states_.empty() ? 0 : states_[0]->rounds; }
  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;
  CompressionLoss loss() const override;
  const Part* PartWithShardResiduals() const override;
  void KeepShardResidual(uint32_t chunk, std::span<const float> residual) override;
  std::vector<float> ShardResidual(uint32_t chunk) const override;
  void ForgetShardResiduals() override;

 private:
  // Elements of the set that are encoded at once, gathered if they do not lie together.
  struct Tile {
    std::vector<float> values;
    std::vector<float> residual;
    std::vector<float> share;  // for Gradient::Read
  };

  LossyCodec(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec);
  // Encodes elements [begin, end) to `out` and returns how many bytes that took.
  uint64_t EncodeTile(uint64_t begin, uint64_t end, const Gradient& gradient, Tile& tile,
                      std::byte* out, CompressionLoss* loss);
  const float* Values(uint64_t begin, uint64_t end, const Gradient& gradient, Tile& tile) const;

  const CodecSpec spec_;
  const WireFormat format_;
  std::vector<std::shared_ptr<ParameterState>> states_;  // by tensor
  std::vector<uint64_t> encoded_begins_;                 // of the chunks in encoded_
  std::unique_ptr<std::byte[]> encoded_;                 // from the first round on
  std::vector<CompressionLoss> losses_;                  // by chunk
};

}  // namespace thalweg
