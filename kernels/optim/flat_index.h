// FlatIndex is one index over all elements of many tensors, so that one parallel region covers
// tensors of any size and threads get the same number of bytes each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/launch/host_device.h"

namespace thalweg {

inline constexpr uint64_t kGranule = 4096;  // elements

THALWEG_HD constexpr uint64_t GranulesOf(uint64_t elems) {
  return elems / kGranule + (elems % kGranule != 0 ? 1 : 0);
}

// A FlatEntry locates a tensor in a flat index.
struct FlatEntry {
  uint64_t position = 0;
  uint64_t first_granule = 0;
  uint64_t elems = 0;
  uint64_t granule_bytes = 0;
};

// A FlatPiece is elements [first, last) of tensor number `tensor`; `first` is a multiple of
// kGranule. `granule` is the number of its first granule among those of all tensors.
struct FlatPiece {
  size_t tensor = 0;
  uint64_t first = 0;
  uint64_t last = 0;
  uint64_t granule = 0;
};

// Returns how many granules of a tensor begin before `position`.
THALWEG_HD inline uint64_t GranulesBefore(const FlatEntry& entry, uint64_t position) {
  if (position <= entry.position) return 0;
  const uint64_t before =
      (position - entry.position + entry.granule_bytes - 1) / entry.granule_bytes;
  const uint64_t count = GranulesOf(entry.elems);
  return before < count ? before : count;
}

// Returns the last of `count` tensors that does not begin behind `position`; 0 when all do.
// entry(i) is the FlatEntry of tensor i.
template <class Entry>
THALWEG_HD size_t TensorAt(const Entry& entry, size_t count, uint64_t position) {
  size_t low = 0;
  size_t high = count;
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    if (entry(middle).position <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls visit(const FlatPiece&) for the granules of `count` tensors that begin in [begin, end), in
// order, those of one tensor together.
template <class Entry, class Visit>
THALWEG_HD void ForEachPiece(const Entry& entry, size_t count, uint64_t begin, uint64_t end,
                             const Visit& visit) {
  if (begin >= end) return;
  for (size_t i = TensorAt(entry, count, begin); i < count && entry(i).position < end; ++i) {
    const FlatEntry flat = entry(i);
    const uint64_t from = GranulesBefore(flat, begin);
    const uint64_t to = GranulesBefore(flat, end);
    if (from >= to) continue;
    const uint64_t last = to * kGranule < flat.elems ? to * kGranule : flat.elems;
    visit(FlatPiece{i, from * kGranule, last, flat.first_granule + from});
  }
}

// Positions are bytes that an update reads and writes, tensor after tensor. Tensors are cut into
// granules of kGranule elements. A granule belongs to the range that contains the position where it
// begins: the cuts between ranges affect who computes something, never the result.
// Thread-compatible.
//
//   FlatIndex index;
//   for (const Tensor& tensor : tensors) index.Add(tensor.elems, 28);
//   at::parallel_for(0, index.Size(), grain, [&](int64_t begin, int64_t end) {
//     index.ForEach(begin, end, [&](const FlatIndex::Piece& piece) { … });
//   });
class FlatIndex {
 public:
  static constexpr uint64_t kGranule = thalweg::kGranule;
  using Piece = FlatPiece;

  // Appends a tensor. Requires bytes_per_elem > 0.
  void Add(uint64_t elems, uint64_t bytes_per_elem) {
    entries_.push_back({size_, granules_, elems, bytes_per_elem * kGranule});
    size_ += elems * bytes_per_elem;
    granules_ += GranulesOf(elems);
  }

  uint64_t Size() const { return size_; }
  uint64_t Granules() const { return granules_; }
  // Returns the number of the first granule of a tensor.
  uint64_t FirstGranule(size_t tensor) const { return entries_[tensor].first_granule; }
  static constexpr uint64_t GranulesOf(uint64_t elems) { return thalweg::GranulesOf(elems); }

  // Calls ForEachPiece() for all tensors.
  template <class Visit>
  void ForEach(uint64_t begin, uint64_t end, const Visit& visit) const {
    const auto entry = [this](size_t i) -> const FlatEntry& { return entries_[i]; };
    ForEachPiece(entry, entries_.size(), begin, end, visit);
  }

 private:
  std::vector<FlatEntry> entries_;
  uint64_t size_ = 0;
  uint64_t granules_ = 0;
};

}  // namespace thalweg
