// LossyCodec for gradients in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/codec/encoded.h"
#include "server/sidecar/codec/lossy_codec.h"

namespace thalweg {

class CpuLossy final : public LossyCodec {
 public:
  // InvalidArgument names a tensor whose state, which somebody has loaded, is of another size.
  static absl::StatusOr<std::unique_ptr<CpuLossy>> Create(TensorSet tensors,
                                                          const CodecPlace& place, uint32_t number,
                                                          const CodecSpec& spec,
                                                          ParameterStates& states);

  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;
  CompressionLoss loss() const override;

 private:
  // Elements of the set that are encoded at once, gathered if they do not lie together.
  struct Tile {
    std::vector<float> values;
    std::vector<float> residual;
    std::vector<float> share;  // for Gradient::Read
  };

  CpuLossy(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec)
      : LossyCodec(std::move(tensors), place, number, spec), losses_(part_.plan.Count()) {}

  // Encodes elements [begin, end) to `out` and returns how many bytes that took.
  uint64_t EncodeTile(uint64_t begin, uint64_t end, const Gradient& gradient, Tile& tile,
                      std::byte* out, CompressionLoss* loss);
  const float* Values(uint64_t begin, uint64_t end, const Gradient& gradient, Tile& tile) const;

  std::unique_ptr<std::byte[]> encoded_;  // from the first round on
  std::vector<CompressionLoss> losses_;   // by chunk
};

}  // namespace thalweg
