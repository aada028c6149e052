#include "core/base/wire_format.h"

namespace thalweg {

const char* Name(WireFormat format) {
  const LossyTraits* const lossy = FindLossy(format);
  return lossy == nullptr ? Name(DTypeOf(format)) : lossy->name;
}

}  // namespace thalweg
