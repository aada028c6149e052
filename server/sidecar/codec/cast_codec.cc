#include "server/sidecar/codec/cast_codec.h"

#include <utility>
#include <vector>

#include "core/base/status_macros.h"
#include "kernels/codec/dense.h"

namespace thalweg {

CastCodec::CastCodec(TensorSet tensors, const CodecPlace& place, uint32_t number, DType wire,
                     bool is_direct)
    : DenseCodec(std::move(tensors), place, number, wire), is_direct_(is_direct) {}

absl::StatusOr<Part*> CastCodec::Begin(FoldPool& /*pool*/, Gradient& /*gradient*/) {
  // The memory is allocated here, because some buckets never get here.
  if (!is_direct_ && encoded_ == nullptr) {
    encoded_ = std::make_unique_for_overwrite<std::byte[]>(tensors_.Elems() * SizeOf(wire_));
  }
  return &part_;
}

absl::StatusOr<std::span<const std::byte>> CastCodec::Encode(const Part& part, uint32_t chunk,
                                                             Gradient& gradient) {
  const size_t size = SizeOf(wire_);
  const uint64_t begin = part.plan.Begin(chunk);
  const uint64_t elems = part.plan.Elems(chunk);
  const auto pieces = tensors_.BucketPieces(begin, begin + elems);
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(pieces.back().offset + pieces.back().elems));
  if (is_direct_) {
    return std::span(static_cast<const std::byte*>(gradient.Shares(begin)[0]), elems * size);
  }
  for (const TensorSet::Piece& piece : pieces) {
    FoldShares(gradient.Shares(piece.offset), gradient.share(), wire_, piece.elems,
               encoded_.get() + piece.begin * size);
  }
  return std::span<const std::byte>(encoded_.get() + begin * size, elems * size);
}

absl::Status CastCodec::Decode(const Part& part, const RoundResult& received) {
  if (part.bucket.update) return DecodeWeights(received);
  const uint64_t begin = part.plan.Begin(received.id.chunk);
  return Scatter(begin, received.elems, [&](std::byte* out) {
    return DecodePayload(received.payload, DTypeOf(received.wire), tensors_.layout().dtype,
                         received.elems, out);
  });
}

absl::StatusOr<uint64_t> CastCodec::Reduce(uint32_t chunk, Gradient& gradient) {
  const DType dtype = tensors_.layout().dtype;
  const uint64_t begin = part_.plan.Begin(chunk);
  const uint64_t elems = part_.plan.Elems(chunk);
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(begin + elems));
  const auto shares = gradient.Shares(begin);
  std::byte* out = place_.result + begin * SizeOf(dtype);
  if (wire_ == dtype) return FoldShares(shares, gradient.share(), wire_, elems, out);
  const size_t bytes = elems * SizeOf(wire_);
  const auto scratch = std::make_unique_for_overwrite<std::byte[]>(bytes);
  const uint64_t nonfinite = FoldShares(shares, gradient.share(), wire_, elems, scratch.get());
  THALWEG_RETURN_IF_ERROR(
      DecodePayload(Payload({scratch.get(), bytes}, nullptr), wire_, dtype, elems, out));
  return nonfinite;
}

}  // namespace thalweg
