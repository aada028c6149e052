#include "core/base/fold.h"

namespace thalweg {

const char* Name(Fold fold) {
  switch (fold) {
    case Fold::kMean:
      return "mean";
    case Fold::kSum:
      return "sum";
    case Fold::kMin:
      return "min";
    case Fold::kMax:
      return "max";
    case Fold::kProduct:
      return "product";
    case Fold::kBitAnd:
      return "bitwise and";
    case Fold::kBitOr:
      return "bitwise or";
    case Fold::kBitXor:
      return "bitwise xor";
    case Fold::kNone:
      return "bytes";
  }
  return "unknown fold";
}

}  // namespace thalweg
