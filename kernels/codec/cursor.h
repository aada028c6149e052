// A Cursor reads a payload from its first byte to its last, wherever its pieces end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "core/base/payload.h"

namespace thalweg {

// It is a position in a payload, for one thread, and must not outlive the payload.
class Cursor {
 public:
  explicit Cursor(const Payload& payload)
      : piece_(payload.pieces.begin()), end_(payload.pieces.end()) {
    SkipEmptyPieces();
  }

  const std::byte* Data() const { return piece_->data() + offset_; }

  // Returns how many bytes are contiguous from here; 0 only at the end.
  size_t ContiguousBytes() const { return piece_ == end_ ? 0 : piece_->size() - offset_; }

  // Requires `bytes` ≤ ContiguousBytes().
  void Advance(size_t bytes) {
    offset_ += bytes;
    SkipEmptyPieces();
  }

  // Copies the next `bytes`, from however many pieces, and moves past them. Requires that they
  // exist.
  void CopyOut(std::byte* to, size_t bytes) {
    while (bytes > 0) {
      const size_t step = std::min(bytes, ContiguousBytes());
      std::memcpy(to, Data(), step);
      Advance(step);
      to += step;
      bytes -= step;
    }
  }

 private:
  void SkipEmptyPieces() {
    while (piece_ != end_ && offset_ == piece_->size()) {
      ++piece_;
      offset_ = 0;
    }
  }

  std::vector<std::span<const std::byte>>::const_iterator piece_;
  std::vector<std::span<const std::byte>>::const_iterator end_;
  size_t offset_ = 0;
};

}  // namespace thalweg
