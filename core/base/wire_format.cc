#include "core/base/wire_format.h"

namespace thalweg {

const char* Name(WireFormat format) {
  const auto lossy = FindLossy(format);
  return lossy ? lossy->name : Name(DTypeOf(format));
}

absl::StatusOr<WireFormat> ParseWireFormat(absl::string_view name) {
  for (const LossyTraits& traits : kLossyTraits) {
    if (name == traits.name) return traits.format;
  }
  const absl::StatusOr<DType> dtype = ParseDType(name);
  if (!dtype.ok()) return dtype.status();
  return FormatOf(*dtype);
}

}  // namespace thalweg
