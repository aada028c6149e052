#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

namespace thalweg {

absl::StatusOr<uint64_t> Job::ResidualElemsLocked(uint32_t node, BucketId bucket,
                                                  uint32_t chunk) const {
  THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
  const absl::StatusOr<uint64_t> elems = rounds_.layouts().ResidualElems(bucket, chunk);
  if (elems.ok()) return elems;
  return OfJob(spec_.job, elems.status());
}

absl::StatusOr<std::vector<float>> Job::ReadResidual(uint32_t node, BucketId bucket,
                                                     uint32_t chunk) {
  std::shared_ptr<ChunkState> state;
  {
    MutexLock lock(mutex_);
    state = rounds_.states().Find(bucket, chunk);
    // A residual outlives its layout until the first round of the next one.
    if (state != nullptr || rounds_.layouts().IsReplaced(bucket)) {
      THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    } else {
      THALWEG_RETURN_IF_ERROR(ResidualElemsLocked(node, bucket, chunk).status());
    }
  }
  if (state == nullptr) return std::vector<float>();
  ChunkState& found = *state;
  MutexLock lock(found.mutex);
  // In place, so that this job goes on with the bits of one that starts with what is returned.
  Rescale(found.residual, found.loss_scale, kNoLossScale);
  return found.residual;
}

absl::Status Job::WriteResidual(uint32_t node, BucketId bucket, uint32_t chunk,
                                std::span<const float> values) {
  const auto refused = [&](const std::string& why) {
    return OfJob(spec_.job,
                 absl::InvalidArgumentError(absl::StrCat("residual of chunk ", chunk, " of bucket ",
                                                         ToString(bucket), ": ", why)));
  };
  // A non-finite residual would make all later results non-finite.
  const auto bad =
      std::find_if(values.begin(), values.end(), [](float v) { return !std::isfinite(v); });
  if (bad != values.end()) {
    return refused(
        absl::StrCat("expected finite values, got ", *bad, " for element ", bad - values.begin()));
  }
  std::vector<float> copy(values.begin(), values.end());
  absl::StatusOr<std::shared_ptr<ChunkState>> state;
  {
    MutexLock lock(mutex_);
    THALWEG_ASSIGN_OR_RETURN(const uint64_t elems, ResidualElemsLocked(node, bucket, chunk));
    if (copy.size() != elems) {
      return refused(absl::StrCat("expected ", elems, " values, got ", copy.size()));
    }
    state = StateLocked(bucket, chunk, elems);
  }
  if (!state.ok()) {
    Fail(state.status());
    return OfJob(spec_.job, state.status());
  }
  ChunkState& written = **state;
  MutexLock lock(written.mutex);
  written.residual.swap(copy);
  written.loss_scale = kNoLossScale;
  return absl::OkStatus();
}

}  // namespace thalweg
