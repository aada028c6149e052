// What encoding a chunk gives.
#pragma once

#include <cstdint>

namespace thalweg {

struct Encoded {
  uint64_t bytes = 0;
  uint64_t nonfinite_elems = 0;  // of the values that were encoded

  bool operator==(const Encoded&) const = default;
};

}  // namespace thalweg
