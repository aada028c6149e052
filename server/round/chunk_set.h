// ChunkSet is a set of chunk numbers, most of which follow each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace thalweg {

// A ChunkSet is thread-compatible.
class ChunkSet {
 public:
  void Add(uint32_t chunk);
  bool Contains(uint32_t chunk) const;
  // Returns how many runs of chunks without gaps it consists of, each of which takes as much
  // memory.
  size_t runs() const { return runs_.size(); }

 private:
  // From the first chunk of each run to its last one.
  std::map<uint32_t, uint32_t> runs_;
};

}  // namespace thalweg
