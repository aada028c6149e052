// This file holds the parts of Job that keep weights and update them.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

namespace thalweg {

absl::Status Job::FindStateLocked(Completed& completed) {
  const RoundId& id = completed.round.id;
  completed.update = layouts_.UpdateOf(id.bucket, id.chunk);
  const bool has_residual = HasResidual(completed.round.wire);
  if (completed.update.rule == nullptr && !has_residual) return absl::OkStatus();
  const bool is_new = chunks_.Find(id.bucket, id.chunk) == nullptr;
  if (completed.update.rule != nullptr) {
    if (is_new) return NoWeights(id);
    if (const uint64_t number = completed.round.settings; number != 0) {
      THALWEG_ASSIGN_OR_RETURN(completed.step, SettingsLocked(id, number));
      THALWEG_RETURN_IF_ERROR(CheckFits(*completed.step, *completed.update.rule));
    }
  }
  THALWEG_ASSIGN_OR_RETURN(completed.state,
                           StateLocked(id.bucket, id.chunk, completed.round.elems));
  if (is_new && has_residual) NoteLostResidualLocked(id);
  return absl::OkStatus();
}

absl::Status Job::NoWeights(const RoundId& id) const {
  if (spec_.resume) return LostWeights();
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(id), ": the shard has no weights to update: nobody has written them"));
}

absl::StatusOr<std::shared_ptr<const UpdateStep>> Job::SettingsLocked(const RoundId& id,
                                                                      uint64_t number) const {
  if (auto found = settings_.Find(number)) return found;
  if (spec_.resume) return LostWeights();
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(id), " names settings ", number, ", which are not known"));
}

absl::StatusOr<std::shared_ptr<ChunkState>> Job::StateLocked(BucketId bucket, uint32_t chunk,
                                                             uint64_t elems) {
  if (auto known = chunks_.Find(bucket, chunk); known != nullptr) return known;
  auto made = chunks_.Get(bucket, chunk, elems, layouts_.Padding(bucket, chunk),
                          layouts_.StateBytesPerElem(bucket));
  const absl::Status reserved = ReserveLocked();
  UpdateMemoryLocked();
  if (!reserved.ok()) return reserved;
  return made;
}

absl::Status Job::SetSettings(uint32_t node, uint64_t number, const UpdateStep& step) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    const uint64_t series = number >> StepSettings::kSeriesBit;
    status = series == 0 || series == uint64_t{node} + 1
                 ? settings_.Set(members_.Name(node), number, step)
                 : absl::InvalidArgumentError(absl::StrCat(members_.Name(node), " gives settings ",
                                                           number, " of another node"));
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
  const auto size = layouts_.SizeOfWeights(bucket, chunk);
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
    state = chunks_.Find(bucket, chunk);
    if (state == nullptr && spec_.resume) return OfJob(spec_.job, LostWeights());
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
