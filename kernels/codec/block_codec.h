// BlockCodec implements LossyKernels for a format whose payloads are blocks
// (core/base/lossy_formats.h), given how the format encodes and decodes blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/feedback.h"
#include "kernels/codec/lossy_kernels.h"

namespace thalweg {

// Immutable, thread-safe.
class BlockCodec final : public LossyKernels {
 public:
  // EncodeBlocks returns how many elements are not finite. Both take `elems` elements, which begin
  // at a block, and MaxEncodedBytes(format, elems) bytes; DecodeBlocks takes any bytes.
  using EncodeBlocks = uint64_t (*)(const float* values, Feedback feedback, size_t elems,
                                    std::byte* out);
  using DecodeBlocks = void (*)(const std::byte* in, size_t elems, float* out);

  constexpr BlockCodec(WireFormat format, EncodeBlocks encode, DecodeBlocks decode)
      : format_(format), encode_(encode), decode_(decode) {}

  Encoded Encode(double topk_ratio, const float* values, Feedback feedback, uint64_t elems,
                 std::byte* out) const override;
  absl::Status Decode(const Payload& payload, DType bucket, uint64_t elems,
                      std::byte* out) const override;
  uint64_t CountLarge(const Payload& payload, float least, uint64_t elems) const override;
  // Folds payloads where they lie.
  absl::StatusOr<Encoded> Fold(std::span<const Payload> contributions, const Weighting& weighting,
                               uint64_t elems, float* residual, std::byte* out) const override;

 private:
  // Encodes a folded mean with feedback, but blocks that are zero without.
  uint64_t EncodeMean(const float* mean, float* residual, uint64_t elems, std::byte* out) const;

  const WireFormat format_;
  const EncodeBlocks encode_;
  const DecodeBlocks decode_;
};

}  // namespace thalweg
