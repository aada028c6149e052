// FlatIndex is one index over all elements of many tensors, so that one parallel region covers
// tensors of any size and threads get the same number of bytes each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/launch/host_device.h"

namespace thalweg {

inline constexpr uint64_t kGranule = 4096;  // elements

THALWEG_HD constexpr uint64_t GranulesOf(uint64_t elems) {
  return elems / kGranule + (elems % kGranule != 0 ? 1 : 0);
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
  // Elements [first, last) of tensor number `tensor`; `first` is a multiple of kGranule. `granule`
  // is the number of its first granule among those of all tensors.
  struct Piece {
    size_t tensor = 0;
    uint64_t first = 0;
    uint64_t last = 0;
    uint64_t granule = 0;
  };

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

  // Calls visit(const Piece&) for the granules that begin in [begin, end), in order, those of one
  // tensor together.
  template <class Visit>
  void ForEach(uint64_t begin, uint64_t end, const Visit& visit) const {
    if (begin >= end) return;
    for (size_t i = TensorAt(begin); i < entries_.size() && entries_[i].position < end; ++i) {
      const Entry& entry = entries_[i];
      const uint64_t from = GranulesBefore(entry, begin);
      const uint64_t to = GranulesBefore(entry, end);
      if (from >= to) continue;
      visit(Piece{i, from * kGranule, std::min(to * kGranule, entry.elems),
                  entry.first_granule + from});
    }
  }

 private:
  struct Entry {
    uint64_t position;
    uint64_t first_granule;
    uint64_t elems;
    uint64_t granule_bytes;
  };

  // Returns how many granules of a tensor begin before `position`.
  static uint64_t GranulesBefore(const Entry& entry, uint64_t position) {
    if (position <= entry.position) return 0;
    const uint64_t before =
        (position - entry.position + entry.granule_bytes - 1) / entry.granule_bytes;
    return std::min(before, GranulesOf(entry.elems));
  }

  // Returns the last tensor that does not begin behind `position`.
  size_t TensorAt(uint64_t position) const {
    const auto behind =
        std::upper_bound(entries_.begin(), entries_.end(), position,
                         [](uint64_t at, const Entry& entry) { return at < entry.position; });
    return behind == entries_.begin() ? 0 : static_cast<size_t>(behind - entries_.begin()) - 1;
  }

  std::vector<Entry> entries_;
  uint64_t size_ = 0;
  uint64_t granules_ = 0;
};

}  // namespace thalweg
