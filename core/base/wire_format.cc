#include "core/base/wire_format.h"

namespace thalweg {

const char* Name(WireFormat format) {
  const auto lossy = FindLossy(format);
  return lossy ? lossy->name : Name(DTypeOf(format));
}

}  // namespace thalweg
