#include "server/sidecar/codec/tensor_set.h"

#include <algorithm>

namespace thalweg {

TensorSet::TensorSet(const BucketLayout& bucket, const std::vector<uint32_t>& members)
    : layout_{bucket.dtype, {}}, begins_{0} {
  uint64_t offset = 0;
  auto next = members.begin();
  for (uint32_t i = 0; i < bucket.tensors.size() && next != members.end(); ++i) {
    const TensorSpec& tensor = bucket.tensors[i];
    if (*next == i) {
      layout_.tensors.push_back(tensor);
      begins_.push_back(begins_.back() + tensor.Elems());
      bucket_offsets_.push_back(offset);
      ++next;
    }
    offset += tensor.Elems();
  }
}

std::vector<TensorSet::Piece> TensorSet::TensorPieces(uint64_t begin, uint64_t end) const {
  std::vector<Piece> pieces;
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), begin);
  for (auto tensor = static_cast<size_t>(after - begins_.begin()) - 1; begin < end; ++tensor) {
    const uint64_t piece_end = std::min(end, begins_[tensor + 1]);
    if (piece_end > begin) {
      pieces.push_back({begin, begin - begins_[tensor], piece_end - begin, tensor});
    }
    begin = piece_end;
  }
  return pieces;
}

std::vector<TensorSet::Piece> TensorSet::BucketPieces(uint64_t begin, uint64_t end) const {
  std::vector<Piece> pieces;
  for (Piece piece : TensorPieces(begin, end)) {
    piece.offset += bucket_offsets_[piece.tensor];
    piece.tensor = 0;
    if (!pieces.empty() && pieces.back().offset + pieces.back().elems == piece.offset) {
      pieces.back().elems += piece.elems;
    } else {
      pieces.push_back(piece);
    }
  }
  return pieces;
}

}  // namespace thalweg
