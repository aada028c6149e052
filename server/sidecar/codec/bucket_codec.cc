#include "server/sidecar/codec/bucket_codec.h"

#include <cstring>
#include <memory>

#include "core/base/status_macros.h"

namespace thalweg {

absl::Status BucketCodec::Scatter(uint64_t begin, uint64_t elems,
                                  const std::function<absl::Status(std::byte*)>& decode) const {
  const size_t size = SizeOf(tensors_.layout().dtype);
  const auto pieces = tensors_.BucketPieces(begin, begin + elems);
  if (pieces[0].elems == elems) return decode(place_.result + pieces[0].offset * size);
  const auto scratch = std::make_unique_for_overwrite<std::byte[]>(elems * size);
  THALWEG_RETURN_IF_ERROR(decode(scratch.get()));
  for (const TensorSet::Piece& piece : pieces) {
    std::memcpy(place_.result + piece.offset * size, scratch.get() + (piece.begin - begin) * size,
                piece.elems * size);
  }
  return absl::OkStatus();
}

}  // namespace thalweg
