// Encoded is the result of encoding a chunk.
#pragma once

#include <cstdint>

namespace thalweg {

struct Encoded {
  uint64_t bytes = 0;
  uint64_t nonfinite_elems = 0;  // of the encoded values

  bool operator==(const Encoded&) const = default;
};

}  // namespace thalweg
