#include "core/base/wire_format.h"

#include "absl/strings/str_cat.h"

namespace thalweg {

const char* Name(WireFormat format) {
  switch (format) {
    case WireFormat::kInt8:
      return "int8";
    case WireFormat::kOneBit:
      return "onebit";
    case WireFormat::kTopK:
      return "topk";
    default:
      return Name(DTypeOf(format));
  }
}

absl::StatusOr<WireFormat> ParseWireFormat(absl::string_view name) {
  for (WireFormat format :
       {WireFormat::kFloat32, WireFormat::kFloat16, WireFormat::kBFloat16, WireFormat::kFloat64,
        WireFormat::kInt8, WireFormat::kOneBit, WireFormat::kTopK}) {
    if (name == Name(format)) return format;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown wire format '", name, "': expected fp32, fp16, bf16, fp64, int8, onebit or topk"));
}

}  // namespace thalweg
