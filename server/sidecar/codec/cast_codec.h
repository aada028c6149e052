// CastCodec is the DenseCodec for gradients in host memory.
#pragma once

#include <memory>

#include "server/sidecar/codec/dense_codec.h"

namespace thalweg {

class CastCodec final : public DenseCodec {
 public:
  // `is_direct`: the tensors are the whole bucket, and the node's only worker puts them into its
  // arena in wire type.
  CastCodec(TensorSet tensors, const CodecPlace& place, uint32_t number, DType wire,
            bool is_direct);

  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;
  absl::StatusOr<uint64_t> Reduce(uint32_t chunk, Gradient& gradient) override;

 private:
  const bool is_direct_;
  std::unique_ptr<std::byte[]> encoded_;  // allocated in the first round, unless is_direct_
};

}  // namespace thalweg
