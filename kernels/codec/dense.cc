#include "kernels/codec/dense.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"
#include "kernels/codec/cursor.h"
#include "kernels/codec/weighting.h"
#include "kernels/reduce/fold_elements.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

constexpr size_t kMaxElementBytes = 8;

absl::Status CheckSize(const std::string& what, const Payload& payload, DType wire,
                       uint64_t elems) {
  const size_t bytes = payload.SizeBytes();
  // The size is divided rather than multiplied: `elems` comes from a peer, and the product could
  // wrap around.
  if (bytes % SizeOf(wire) == 0 && bytes / SizeOf(wire) == elems) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected ", elems, " elements of ",
                                                 Name(wire), ", got ", bytes, " bytes"));
}

// Checks that there are contributions of `elems` elements each, and calls fold(inputs, to, run) for
// runs of elements that are contiguous in all of them; `to` is where the run's results go in `out`.
// Adds up what the calls return.
template <class FoldRun>
absl::Status FoldRuns(std::span<const Payload> contributions, DType wire, uint64_t elems, void* out,
                      uint64_t* nonfinite_elems, const FoldRun& fold) {
  if (!IsValid(wire)) {
    return absl::InvalidArgumentError(
        absl::StrCat("fold: unknown element type ", static_cast<int>(wire)));
  }
  for (size_t k = 0; k < contributions.size(); ++k) {
    THALWEG_RETURN_IF_ERROR(
        CheckSize(absl::StrCat("contribution ", k), contributions[k], wire, elems));
  }
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
      // The next element straddles two pieces of some contribution: only this element is copied
      // together.
      run = 1;
      for (size_t k = 0; k < cursors.size(); ++k) {
        inputs[k] = bridges[k].data();
        cursors[k].CopyOut(bridges[k].data(), element_bytes);
      }
    }
    *nonfinite_elems += fold(inputs, to, run);
    to += run * element_bytes;
    left -= run;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FoldPayloads(std::span<const Payload> contributions, std::span<const uint32_t> workers,
                          DType wire, uint64_t elems, void* out, uint64_t* nonfinite_elems) {
  if (!IsFloat(wire)) {
    return absl::InvalidArgumentError(
        absl::StrCat("fold: expected floats for a mean, got type ", static_cast<int>(wire)));
  }
  THALWEG_ASSIGN_OR_RETURN(const Weighting weighting, WeightingOf(contributions.size(), workers));
  return FoldRuns(contributions, wire, elems, out, nonfinite_elems,
                  [&](std::span<const void* const> inputs, void* to, uint64_t run) {
                    return FoldMean(inputs, weighting.weights, weighting.divisor, wire, wire, to,
                                    run);
                  });
}

absl::Status FoldPayloads(Fold fold, std::span<const Payload> contributions, DType wire,
                          uint64_t elems, void* out, uint64_t* nonfinite_elems) {
  if (contributions.empty() || !IsUnweighted(fold) || (IsBitwise(fold) && IsFloat(wire))) {
    return absl::InvalidArgumentError(
        absl::StrCat("fold: expected one without weights, of at least one contribution, got '",
                     Name(fold), "' of ", contributions.size(), " in ", Name(wire)));
  }
  return FoldRuns(contributions, wire, elems, out, nonfinite_elems,
                  [&](std::span<const void* const> inputs, void* to, uint64_t run) {
                    return FoldElements(fold, inputs, wire, to, run);
                  });
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
