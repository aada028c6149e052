// DType numbers the element types of gradients and of what crosses the network. The numeric values
// are part of the wire format and of the ipc format: never renumber.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace thalweg {

enum class DType : uint8_t { kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3, kFloat64 = 4 };

// Returns true for the four values above; any other value came from outside and must be refused.
constexpr bool IsValid(DType dtype) { return dtype >= DType::kFloat32 && dtype <= DType::kFloat64; }

constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

// Returns "fp32", "fp16", "bf16" or "fp64".
const char* Name(DType dtype);
absl::StatusOr<DType> ParseDType(absl::string_view name);

}  // namespace thalweg
