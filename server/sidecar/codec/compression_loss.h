// How much a round of compression left out, for statistics.
#pragma once

#include <cmath>

namespace thalweg {

// A CompressionLoss is what a round of compression did not transfer, as squared norms.
struct CompressionLoss {
  double residual = 0;  // of what is left for later
  double whole = 0;     // of what was to be sent

  CompressionLoss& operator+=(const CompressionLoss& other) {
    residual += other.residual;
    whole += other.whole;
    return *this;
  }
};

// Returns ‖residual‖ / ‖whole‖; 0 when nothing was to be sent.
inline double ErrorRatio(const CompressionLoss& loss) {
  return loss.whole > 0 ? std::sqrt(loss.residual / loss.whole) : 0;
}

}  // namespace thalweg
