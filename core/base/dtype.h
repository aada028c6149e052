// DType numbers the element types of gradients and of what crosses the network. The numeric values
// are part of the wire format and of the ipc format: never renumber. Gradients are floats; integers
// are for collectives, where uint8 also stands for bytes of any meaning.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace thalweg {

enum class DType : uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat64 = 4,
  kUInt8 = 5,
  kInt8 = 6,
  kInt16 = 7,
  kInt32 = 8,
  kInt64 = 9,
};

// Returns true for the values above; any other value came from outside and must be refused.
constexpr bool IsValid(DType dtype) { return dtype >= DType::kFloat32 && dtype <= DType::kInt64; }

constexpr bool IsFloat(DType dtype) { return dtype >= DType::kFloat32 && dtype <= DType::kFloat64; }

constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  return 0;
}

// Returns "fp32", "fp16", "bf16", "fp64", "uint8", "int8", "int16", "int32" or "int64".
const char* Name(DType dtype);
// Knows the floats only.
absl::StatusOr<DType> ParseDType(absl::string_view name);

}  // namespace thalweg
