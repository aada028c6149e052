// This file holds the parts of Job that keep weights and update them.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

namespace thalweg {

absl::StatusOr<std::shared_ptr<ChunkState>> Job::StateLocked(BucketId bucket, uint32_t chunk,
                                                             uint64_t elems) {
  std::shared_ptr<ChunkState> state = rounds_.StateOf(bucket, chunk, elems);
  THALWEG_RETURN_IF_ERROR(memory_.ReserveStates());
  UpdateMemoryLocked();
  return state;
}

absl::Status Job::SetSettings(uint32_t node, uint64_t number, const UpdateStep& step) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    status = rounds_.SetSettings(node, number, step);
  }
  if (!status.ok()) Fail(status);
  return OfJob(spec_.job, status);
}

namespace {

std::vector<float>& ValuesOf(Weights& weights, uint32_t slice) {
  return slice == 0 ? weights.params : weights.moments[slice - 1];
}

}  // namespace

absl::StatusOr<uint64_t> Job::WeightElemsLocked(uint32_t node, BucketId bucket, uint32_t chunk,
                                                uint32_t slice) const {
  THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
  const auto size = rounds_.layouts().SizeOfWeights(bucket, chunk);
  if (!size.ok()) return OfJob(spec_.job, size.status());
  if (slice <= size->moments) return size->elems;
  return OfJob(spec_.job, absl::InvalidArgumentError(absl::StrCat(
                              "weights of chunk ", chunk, " of bucket ", ToString(bucket),
                              ": expected a slice up to ", size->moments, ", got ", slice)));
}

absl::StatusOr<WeightsSlice> Job::ReadWeights(uint32_t node, BucketId bucket, uint32_t chunk,
                                              uint32_t slice) {
  std::shared_ptr<ChunkState> state;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(WeightElemsLocked(node, bucket, chunk, slice).status());
    state = rounds_.states().Find(bucket, chunk);
    if (state == nullptr && spec_.resume) return OfJob(spec_.job, rounds_.LostWeights());
  }
  if (state == nullptr) return WeightsSlice();
  ChunkState& found = *state;
  MutexLock lock(found.mutex);
  return WeightsSlice{ValuesOf(found.weights, slice), found.weights.steps};
}

absl::Status Job::WriteWeights(uint32_t node, BucketId bucket, uint32_t chunk, uint32_t slice,
                               WeightsSlice weights) {
  absl::StatusOr<std::shared_ptr<ChunkState>> state;
  {
    MutexLock lock(mutex_);
    THALWEG_ASSIGN_OR_RETURN(const uint64_t elems, WeightElemsLocked(node, bucket, chunk, slice));
    const size_t got = weights.values.size();
    if (got != elems && (slice == 0 || got != 0)) {
      return OfJob(spec_.job, absl::InvalidArgumentError(absl::StrCat(
                                  "weights of chunk ", chunk, " of bucket ", ToString(bucket),
                                  ": expected ", elems, " values", slice == 0 ? "" : " or none",
                                  " in slice ", slice, ", got ", got)));
    }
    state = StateLocked(bucket, chunk, elems);
  }
  if (!state.ok()) {
    Fail(state.status());
    return OfJob(spec_.job, state.status());
  }
  ChunkState& written = **state;
  MutexLock lock(written.mutex);
  Weights& changed = written.WeightsToChange();
  ValuesOf(changed, slice) = std::move(weights.values);
  if (slice == 0) written.sent.clear();
  changed.steps = weights.steps;
  return absl::OkStatus();
}

}  // namespace thalweg
