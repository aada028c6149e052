// A copy to memory that nobody reads soon.
#pragma once

#include <span>

namespace thalweg {

// Copies `from` to `to`, which has room for it, past the caches where the CPU can do that: what
// lies in the caches stays there, and the lines of `to` are not read first. Thread-safe.
void StreamingCopy(std::span<const float> from, float* to);

}  // namespace thalweg
