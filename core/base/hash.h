// Fnv1a is the 64-bit FNV-1a hash. It is the same in every process and release, and detects peers
// that disagree. It does not resist adversaries.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace thalweg {

// Thread-compatible.
class Fnv1a {
 public:
  void Add(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < size; ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3ULL;
  }
  void Add(uint64_t value) {
    static_assert(std::endian::native == std::endian::little);
    Add(&value, sizeof value);
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

}  // namespace thalweg
