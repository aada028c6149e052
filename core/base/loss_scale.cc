#include "core/base/loss_scale.h"

#include <cmath>

namespace thalweg {

bool IsLossScale(double scale) {
  return scale == kUnknownLossScale || (scale > 0 && std::isfinite(scale));
}

bool ChangesUnits(double from, double to) {
  return from != to && from != kUnknownLossScale && to != kUnknownLossScale;
}

void Rescale(std::span<float> residual, double& scale, double to) {
  if (ChangesUnits(scale, to)) {
    const double ratio = to / scale;
    for (float& element : residual) {
      const auto converted = static_cast<float>(element * ratio);
      element = std::isfinite(converted) ? converted : 0;
    }
  }
  if (to != kUnknownLossScale) scale = to;
}

}  // namespace thalweg
