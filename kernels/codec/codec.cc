#include "kernels/codec/codec.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

constexpr size_t kMaxElementBytes = 8;

// A position in a payload. One thread; must not outlive the payload.
class Cursor {
 public:
  explicit Cursor(const Payload& payload)
      : piece_(payload.pieces.begin()), end_(payload.pieces.end()) {
    SkipEmptyPieces();
  }

  const std::byte* Data() const { return piece_->data() + offset_; }

  // How many bytes lie one after the other from here; 0 only at the end.
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

absl::Status CheckSize(const std::string& what, const Payload& payload, DType wire,
                       uint64_t elems) {
  const size_t bytes = payload.SizeBytes();
  // Divided rather than multiplied: `elems` comes from a peer, and the product could wrap around.
  if (bytes % SizeOf(wire) == 0 && bytes / SizeOf(wire) == elems) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected ", elems, " elements of ",
                                                 Name(wire), ", got ", bytes, " bytes"));
}

absl::Status CheckContributions(std::span<const Payload> contributions,
                                std::span<const uint32_t> workers, DType wire, uint64_t elems) {
  if (!IsValid(wire)) {
    return absl::InvalidArgumentError(
        absl::StrCat("fold: unknown element type ", static_cast<int>(wire)));
  }
  if (contributions.empty() || contributions.size() != workers.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("fold: expected as many worker counts as contributions, at least one; got ",
                     workers.size(), " for ", contributions.size()));
  }
  for (size_t k = 0; k < contributions.size(); ++k) {
    const std::string what = absl::StrCat("contribution ", k);
    if (workers[k] == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": expected to stand for at least one worker, got 0"));
    }
    THALWEG_RETURN_IF_ERROR(CheckSize(what, contributions[k], wire, elems));
  }
  return absl::OkStatus();
}

// What FoldMean multiplies with and divides by.
struct Weighting {
  std::vector<float> weights;
  float divisor = 0;
};

Weighting WeightingOf(std::span<const uint32_t> workers) {
  uint32_t common = 0;
  for (uint32_t count : workers) common = std::gcd(common, count);
  Weighting result;
  uint64_t total = 0;
  for (uint32_t count : workers) {
    result.weights.push_back(static_cast<float>(count / common));
    total += count / common;
  }
  result.divisor = static_cast<float>(total);
  return result;
}

}  // namespace

absl::Status FoldPayloads(std::span<const Payload> contributions, std::span<const uint32_t> workers,
                          DType wire, uint64_t elems, void* out, uint64_t* nonfinite_elems) {
  THALWEG_RETURN_IF_ERROR(CheckContributions(contributions, workers, wire, elems));
  const Weighting weighting = WeightingOf(workers);
  const size_t element_bytes = SizeOf(wire);
  std::vector<Cursor> cursors(contributions.begin(), contributions.end());
  std::vector<const void*> inputs(cursors.size());
  std::vector<std::array<std::byte, kMaxElementBytes>> bridges(cursors.size());
  std::byte* to = static_cast<std::byte*>(out);
  *nonfinite_elems = 0;
  for (uint64_t left = elems; left > 0;) {
    uint64_t run = left;
    for (const Cursor& cursor : cursors) {
      run = std::min<uint64_t>(run, cursor.ContiguousBytes() / element_bytes);
    }
    if (run > 0) {
      for (size_t k = 0; k < cursors.size(); ++k) {
        inputs[k] = cursors[k].Data();
        cursors[k].Advance(run * element_bytes);
      }
    } else {
      // The next element straddles two pieces of some contribution: only it is copied together.
      run = 1;
      for (size_t k = 0; k < cursors.size(); ++k) {
        inputs[k] = bridges[k].data();
        cursors[k].CopyOut(bridges[k].data(), element_bytes);
      }
    }
    *nonfinite_elems += FoldMean(inputs, weighting.weights, weighting.divisor, wire, wire, to, run);
    to += run * element_bytes;
    left -= run;
  }
  return absl::OkStatus();
}

absl::Status DecodePayload(const Payload& payload, DType wire, DType bucket, uint64_t elems,
                           void* out) {
  const bool narrowed = bucket == DType::kFloat32 && SizeOf(wire) == 2;
  if (!IsValid(wire) || (wire != bucket && !narrowed)) {
    return absl::InvalidArgumentError(absl::StrCat("decode: a bucket of type ", Name(bucket),
                                                   " never crosses the network as ", Name(wire)));
  }
  THALWEG_RETURN_IF_ERROR(CheckSize("result", payload, wire, elems));
  const size_t element_bytes = SizeOf(wire);
  std::byte* to = static_cast<std::byte*>(out);
  Cursor cursor(payload);
  for (uint64_t left = elems; left > 0;) {
    uint64_t run = std::min<uint64_t>(left, cursor.ContiguousBytes() / element_bytes);
    if (run > 0) {
      Cast(wire, cursor.Data(), bucket, to, run);
      cursor.Advance(run * element_bytes);
    } else {
      run = 1;
      std::array<std::byte, kMaxElementBytes> bridge;
      cursor.CopyOut(bridge.data(), element_bytes);
      Cast(wire, bridge.data(), bucket, to, 1);
    }
    to += run * SizeOf(bucket);
    left -= run;
  }
  return absl::OkStatus();
}

}  // namespace thalweg
