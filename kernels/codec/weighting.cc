#include "kernels/codec/weighting.h"

#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace thalweg {

absl::StatusOr<Weighting> WeightingOf(size_t contributions, std::span<const uint32_t> workers) {
  if (contributions == 0 || contributions != workers.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("fold: expected as many worker counts as contributions, at least one; got ",
                     workers.size(), " for ", contributions));
  }
  uint32_t common = 0;
  for (size_t k = 0; k < workers.size(); ++k) {
    if (workers[k] == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("contribution ", k, ": expected to stand for at least one worker, got 0"));
    }
    common = std::gcd(common, workers[k]);
  }
  Weighting result;
  uint64_t total = 0;
  for (uint32_t count : workers) {
    result.weights.push_back(static_cast<float>(count / common));
    total += count / common;
  }
  result.divisor = static_cast<float>(total);
  return result;
}

}  // namespace thalweg
