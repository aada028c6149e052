// How the values of a chunk cross the network: as elements of one type, or in one of the lossy
// formats that docs/codecs.md describes byte by byte. The numeric values are part of the wire
// format and of the ipc format: never renumber.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/dtype.h"
#include "core/base/lossy_limits.h"

namespace thalweg {

// The dense formats keep the numbers of their element type.
enum class WireFormat : uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat64 = 4,
  kInt8 = 16,    // blocks of a scale and a byte for each element
  kOneBit = 17,  // blocks of a scale and a bit for each element
  kTopK = 18,    // the largest elements alone, each with its index
};

// True for the dense formats: the payload is the elements, one after the other.
constexpr bool IsDense(WireFormat format) {
  return format >= WireFormat::kFloat32 && format <= WireFormat::kFloat64;
}

// True for the values above; anything else came from outside and must be refused.
constexpr bool IsValid(WireFormat format) {
  return IsDense(format) || (format >= WireFormat::kInt8 && format <= WireFormat::kTopK);
}

constexpr WireFormat FormatOf(DType dtype) { return static_cast<WireFormat>(dtype); }

// Requires a dense format.
constexpr DType DTypeOf(WireFormat format) { return static_cast<DType>(format); }

// A topk payload without entries is its count alone.
inline constexpr uint64_t kMinTopKBytes = 4;

// Most bytes that a chunk of `elems` elements takes. Requires elems ≤ 2^60.
constexpr uint64_t MaxEncodedBytes(WireFormat format, uint64_t elems) {
  switch (format) {
    case WireFormat::kInt8:
      return elems + 4 * ((elems + kInt8BlockElems - 1) / kInt8BlockElems);
    case WireFormat::kOneBit:
      return (elems + 7) / 8 + 4 * ((elems + kOneBitBlockElems - 1) / kOneBitBlockElems);
    case WireFormat::kTopK:
      // The count, and for each entry a float and the gap before it. A gap of d elements takes at
      // most d + 1 bytes, so all gaps together take at most one for each element.
      return kMinTopKBytes + 5 * elems;
    default:
      return elems * SizeOf(DTypeOf(format));
  }
}

// True when every payload of `elems` elements has exactly MaxEncodedBytes(format, elems) bytes.
constexpr bool HasFixedSize(WireFormat format) { return format != WireFormat::kTopK; }

// Whether a payload of `bytes` bytes may be a chunk of `elems` elements; both may come from outside
// and be anything. What topk has in its bytes is for the decoder to check.
constexpr bool IsPayloadSize(WireFormat format, uint64_t elems, uint64_t bytes) {
  // Keeps the sizes from wrapping around; no payload has that many elements.
  if (elems > (IsDense(format) ? uint64_t{1} << 60 : kMaxLossyElems)) return false;
  const uint64_t most = MaxEncodedBytes(format, elems);
  return HasFixedSize(format) ? bytes == most : bytes >= kMinTopKBytes && bytes <= most;
}

// "fp32", "fp16", "bf16", "fp64", "int8", "onebit", "topk".
const char* Name(WireFormat format);
absl::StatusOr<WireFormat> ParseWireFormat(absl::string_view name);

}  // namespace thalweg
