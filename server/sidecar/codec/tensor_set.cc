#include "server/sidecar/codec/tensor_set.h"

#include <algorithm>
#include <utility>

namespace thalweg {

TensorSet::TensorSet(const BucketLayout& bucket, const std::vector<uint32_t>& members)
    : layout_{bucket.dtype, {}}, members_(members), begins_{0} {
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

TensorSet TensorSet::AlignedTo(uint64_t elems) && {
  uint64_t end = 0;
  for (size_t i = 0; i < layout_.tensors.size(); ++i) {
    begins_[i] = (end + elems - 1) / elems * elems;
    end = begins_[i] + layout_.tensors[i].Elems();
  }
  begins_.back() = end;
  return std::move(*this);
}

std::vector<TensorSpec> TensorSet::PaddedTensors() const {
  std::vector<TensorSpec> padded;
  uint64_t end = 0;
  for (size_t i = 0; i < layout_.tensors.size(); ++i) {
    if (begins_[i] > end) padded.push_back({"", {static_cast<int64_t>(begins_[i] - end)}});
    padded.push_back(layout_.tensors[i]);
    end = begins_[i] + layout_.tensors[i].Elems();
  }
  return padded;
}

std::vector<TensorSet::Piece> TensorSet::TensorPieces(uint64_t begin, uint64_t end) const {
  std::vector<Piece> pieces;
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), begin);
  for (auto tensor = static_cast<size_t>(after - begins_.begin()) - 1;
       tensor < layout_.tensors.size() && begins_[tensor] < end; ++tensor) {
    const uint64_t first = std::max(begin, begins_[tensor]);
    const uint64_t last = std::min(end, begins_[tensor] + layout_.tensors[tensor].Elems());
    if (last > first) pieces.push_back({first, first - begins_[tensor], last - first, tensor});
  }
  return pieces;
}

std::vector<TensorSet::Piece> TensorSet::BucketPieces(uint64_t begin, uint64_t end) const {
  std::vector<Piece> pieces;
  for (Piece piece : TensorPieces(begin, end)) {
    piece.offset += bucket_offsets_[piece.tensor];
    piece.tensor = 0;
    const bool follows = !pieces.empty() &&
                         pieces.back().begin + pieces.back().elems == piece.begin &&
                         pieces.back().offset + pieces.back().elems == piece.offset;
    if (follows) {
      pieces.back().elems += piece.elems;
    } else {
      pieces.push_back(piece);
    }
  }
  return pieces;
}

}  // namespace thalweg
