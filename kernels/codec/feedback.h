// Where the residual of a chunk lies, and where that of the next one goes.
#pragma once

#include <cstdint>

namespace thalweg {

// Both are one place, or do not overlap. Null: there is no error feedback.
struct Feedback {
  Feedback(float* both) : last(both), next(both) {}  // NOLINT: most have one place
  Feedback(const float* last, float* next) : last(last), next(next) {}

  explicit operator bool() const { return next != nullptr; }
  Feedback From(uint64_t elems) const { return {last + elems, next + elems}; }

  const float* last;
  float* next;
};

}  // namespace thalweg
