// This header implements the wire format topk: the largest elements of a chunk, each with its
// index. docs/codecs.md describes it byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/codec/encoded.h"
#include "kernels/codec/feedback.h"
#include "kernels/codec/weighting.h"

namespace thalweg {

// Returns how many elements of a chunk of `elems` are sent: ratio · elems, rounded up, at least
// one. Requires 0 < ratio ≤ 1.
uint64_t TopKCount(double ratio, uint64_t elems);

// Encodes the `count` elements of x = values + the last residual (x = values without feedback) of
// largest magnitude into at most MaxEncodedBytes(kTopK, elems) bytes at `out`; of equal magnitudes
// the lower index goes first. Zeros are never sent; all non-finite elements are, also when they are
// more than `count`. The next residual is x − what the bytes decode to, that is 0 for the elements
// that are sent and x for the rest; that of a non-finite element stays as it was. A NaN is sent as
// the positive quiet one without payload. Requires elems ≤ kMaxLossyElems and count ≥ 1. Residuals
// must not overlap `values`. Thread-safe.
Encoded EncodeTopK(const float* values, Feedback feedback, uint64_t elems, uint64_t count,
                   std::byte* out);

// Returns InvalidArgument unless `payload` is exactly one chunk of `elems` elements: rising indices
// inside the chunk, as many entries as announced, gaps in their shortest form, no byte beyond.
absl::Status CheckTopK(std::span<const std::byte> payload, uint64_t elems);

// TopKEntries iterates over a payload that CheckTopK has accepted, in the order of indices. Only
// one thread may use it; it must not outlive the payload.
class TopKEntries {
 public:
  explicit TopKEntries(std::span<const std::byte> payload);

  bool Done() const { return left_ == 0; }
  // These return the current entry. They require that Done() is false.
  uint64_t index() const { return index_; }
  float value() const;
  void Next();

 private:
  void ReadGap();

  const std::byte* at_;
  uint64_t index_ = 0;
  uint32_t left_;
};

// Folds N ≥ 1 payloads that CheckTopK has accepted for `elems` into one, at `out`, with every index
// that occurs in any of them: the mean over all workers, where an absent element counts as 0,
// summed in float32 in the order of `contributions` as FoldMean does. Takes at most the bytes of
// all contributions together. Thread-safe.
Encoded FoldTopK(std::span<const std::span<const std::byte>> contributions,
                 const Weighting& weighting, uint64_t elems, std::byte* out);

}  // namespace thalweg
