// Functions of a WireFormat (lossy_formats.h) alone: names, sizes of payloads, and which formats
// need a residual on shards. docs/codecs.md describes the formats byte by byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/dtype.h"
#include "core/base/lossy_formats.h"

namespace thalweg {

// Returns true for the dense formats: the payload is the elements, one after the other.
constexpr bool IsDense(WireFormat format) {
  return format >= WireFormat::kFloat32 && format <= WireFormat::kDenseInt64;
}

// Returns true for the dense formats and those of the registry; any other value came from outside
// and must be refused.
constexpr bool IsValid(WireFormat format) {
  return IsDense(format) || FindLossy(format).has_value();
}

constexpr bool IsInteger(WireFormat format) {
  return format >= WireFormat::kDenseUInt8 && format <= WireFormat::kDenseInt64;
}

constexpr WireFormat FormatOf(DType dtype) { return static_cast<WireFormat>(dtype); }

// Requires a dense format.
constexpr DType DTypeOf(WireFormat format) { return static_cast<DType>(format); }

// Returns the maximal bytes of a chunk of `elems` elements. Requires elems ≤ 2^60.
constexpr uint64_t MaxEncodedBytes(WireFormat format, uint64_t elems) {
  const std::optional<LossyTraits> lossy = FindLossy(format);
  if (!lossy) return elems * SizeOf(DTypeOf(format));
  const uint64_t block = lossy->block_elems;
  const uint64_t scales = block == 0 ? 0 : (elems + block - 1) / block * kBlockScaleBytes;
  const uint64_t bits = lossy->elem_bits;
  return lossy->min_bytes + elems / 8 * bits + (elems % 8 * bits + 7) / 8 + scales;
}

// Returns the maximal bytes of a chunk of `elems` elements in any lossy format.
constexpr uint64_t MaxLossyBytes(uint64_t elems) {
  uint64_t most = 0;
  for (const LossyTraits& lossy : kLossyTraits) {
    most = std::max(most, MaxEncodedBytes(lossy.format, elems));
  }
  return most;
}

// Returns true when every payload of `elems` elements has exactly MaxEncodedBytes(format, elems)
// bytes.
constexpr bool HasFixedSize(WireFormat format) {
  const std::optional<LossyTraits> lossy = FindLossy(format);
  return !lossy || lossy->block_elems != 0;
}

// Returns true when a shard keeps a residual for results in this format, because they lose
// something.
constexpr bool HasResidual(WireFormat format) {
  const std::optional<LossyTraits> lossy = FindLossy(format);
  return lossy && lossy->has_shard_residual;
}

// Returns whether a payload of `bytes` bytes may be a chunk of `elems` elements; both may come from
// outside and have any value. The decoder checks the contents of payloads without a fixed size.
constexpr bool IsPayloadSize(WireFormat format, uint64_t elems, uint64_t bytes) {
  const std::optional<LossyTraits> lossy = FindLossy(format);
  // This check keeps the sizes from wrapping around; no payload has that many elements.
  if (elems > (!lossy ? uint64_t{1} << 60 : kMaxLossyElems)) return false;
  const uint64_t most = MaxEncodedBytes(format, elems);
  return HasFixedSize(format) ? bytes == most : bytes >= lossy->min_bytes && bytes <= most;
}

// Returns the name of the element type, or the one in the registry.
const char* Name(WireFormat format);
// Returns the lossy format, or that of floats, of this name. InvalidArgument: there is none.
absl::StatusOr<WireFormat> ParseWireFormat(absl::string_view name);

}  // namespace thalweg
