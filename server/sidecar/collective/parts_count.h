// This header counts which parts of a result are complete.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace thalweg {

// A result of `bytes` bytes has parts of `part_bytes`; the last may be shorter. Thread-compatible.
class PartsCount {
 public:
  // Counts nothing.
  PartsCount() = default;
  PartsCount(uint64_t bytes, uint64_t part_bytes) : bytes_(bytes), part_bytes_(part_bytes) {
    missing_.assign((bytes + part_bytes - 1) / part_bytes, part_bytes);
    if (bytes % part_bytes != 0) missing_.back() = bytes % part_bytes;
  }

  // Bytes [begin, end) have come, for the first time.
  void Add(uint64_t begin, uint64_t end) {
    if (missing_.empty()) return;
    while (begin < end) {
      const uint64_t part = begin / part_bytes_;
      const uint64_t here = std::min(end, (part + 1) * part_bytes_) - begin;
      missing_[part] -= here;
      if (missing_[part] == 0) complete_.push_back(static_cast<uint32_t>(part));
      begin += here;
    }
  }

  // Returns the parts that have become complete since the last call.
  std::vector<uint32_t> Take() { return std::exchange(complete_, {}); }

  uint64_t Begin(uint32_t part) const { return part * part_bytes_; }
  uint64_t End(uint32_t part) const { return std::min(bytes_, (part + 1) * part_bytes_); }

 private:
  uint64_t bytes_ = 0;
  uint64_t part_bytes_ = 0;
  std::vector<uint64_t> missing_;  // bytes, by part
  std::vector<uint32_t> complete_;
};

}  // namespace thalweg
