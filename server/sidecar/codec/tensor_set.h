// Some tensors of a bucket, one after the other: what one codec takes care of. Between them there
// may be padding, elements that belong to no tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/layout.h"

namespace thalweg {

// Immutable.
class TensorSet {
 public:
  // Elements that lie next to each other both in the set and somewhere else.
  struct Piece {
    uint64_t begin = 0;   // in the set
    uint64_t offset = 0;  // where they begin in the bucket, or in tensor `tensor`
    uint64_t elems = 0;
    size_t tensor = 0;  // of TensorPieces: which of the set's
  };

  // The tensors of `bucket` with these numbers, which rise.
  TensorSet(const BucketLayout& bucket, const std::vector<uint32_t>& members);

  // Moves the tensors into a set with the least padding that lets each begin at a multiple of
  // `elems`.
  TensorSet AlignedTo(uint64_t elems) &&;

  // The set as if it were a bucket of its own, without the padding.
  const BucketLayout& layout() const { return layout_; }
  // The tensors, and the padding as tensors without a name.
  std::vector<TensorSpec> PaddedTensors() const;
  uint64_t Elems() const { return begins_.back(); }  // with the padding
  uint64_t Bytes() const { return layout_.Elems() * SizeOf(layout_.dtype); }
  // Returns a tensor's number in the bucket.
  uint32_t BucketNumber(size_t tensor) const { return members_[tensor]; }
  // Returns the element at which a tensor begins in the bucket.
  uint64_t BucketOffset(size_t tensor) const { return bucket_offsets_[tensor]; }

  // Both leave out the padding. The first: elements [begin, end) of the set, cut where they do not
  // follow each other in the set and in the bucket.
  std::vector<Piece> BucketPieces(uint64_t begin, uint64_t end) const;
  // The second: cut where another tensor begins. Tensors without elements have no piece.
  std::vector<Piece> TensorPieces(uint64_t begin, uint64_t end) const;

 private:
  BucketLayout layout_;
  std::vector<uint32_t> members_;
  std::vector<uint64_t> begins_;  // of the tensors in the set, and its end
  std::vector<uint64_t> bucket_offsets_;
};

}  // namespace thalweg
