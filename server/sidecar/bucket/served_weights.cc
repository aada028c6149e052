#include "server/sidecar/bucket/served_weights.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"

namespace thalweg {

absl::Status ServedWeights::SetSettings(const std::string& owner, const ipc::SetSettings& message) {
  {
    MutexLock lock(mutex_);
    const bool is_first = settings_.Find(message.number) == nullptr;
    THALWEG_RETURN_IF_ERROR(settings_.Set(owner, message.number, message.step));
    if (!is_first) return absl::OkStatus();
  }
  return shards_.SetSettings(message.number, message.step, Now() + patience_);
}

absl::StatusOr<ipc::Snapshots> ServedWeights::Snapshots(const ipc::GetSnapshots& message,
                                                        const Alive& alive) {
  THALWEG_ASSIGN_OR_RETURN(SnapshotReport found, shards_.Snapshots({}, Now() + patience_));
  const bool has_begun = message.action == SnapshotAction::kTake && !found.is_writing;
  SnapshotCall call{message.action, message.id};
  if (!found.complete.empty()) call.common = found.complete.back();
  if (has_begun) {
    THALWEG_ASSIGN_OR_RETURN(found, shards_.Snapshots(call, Now() + patience_));
  }
  if (call.action == SnapshotAction::kRestore) {
    THALWEG_ASSIGN_OR_RETURN(found, Restore(call, alive));
  }
  found.has_begun = has_begun;
  return ipc::Snapshots{std::move(found)};
}

absl::StatusOr<SnapshotReport> ServedWeights::Restore(const SnapshotCall& call,
                                                      const Alive& alive) {
  Mutex mutex;
  CondVar changed;
  std::optional<absl::StatusOr<SnapshotReport>> found;
  const Thread restoring("restore", [&] {
    auto answer = shards_.Snapshots(call, Now() + restoring_);
    MutexLock lock(mutex);
    found = std::move(answer);
    changed.NotifyAll();
  });
  while (true) {
    {
      MutexLock lock(mutex);
      if (changed.WaitUntil(mutex, Now() + patience_ / 8, [&] { return found.has_value(); })) break;
    }
    alive();
  }
  return *std::move(found);
}

absl::StatusOr<std::shared_ptr<NodeBucket>> ServedWeights::Find(BucketId id) const {
  std::shared_ptr<NodeBucket> bucket = buckets_.Find(id.index);
  if (bucket == nullptr || bucket->id() != id || !bucket->update()) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", ToString(id), " has no weights on shards"));
  }
  if (bucket->round().in_flight()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the weights of bucket ", ToString(id),
                     " were asked for or replaced while a round of it was in flight"));
  }
  return bucket;
}

absl::StatusOr<std::pair<ipc::Weights, BucketArena>> ServedWeights::Read(
    const ipc::GetWeights& message, const Alive& alive) {
  THALWEG_ASSIGN_OR_RETURN(const std::shared_ptr<NodeBucket> bucket, Find(message.id));
  const Part& part = bucket->updated_part();
  ipc::Weights answer{.id = message.id, .slice = message.slice};
  THALWEG_ASSIGN_OR_RETURN(
      BucketArena arena,
      BucketArena::Create("thalweg-weights", part.Elems() * sizeof(float), true));
  auto* const values = reinterpret_cast<float*>(arena.payload());
  uint32_t written = 0;
  for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
    THALWEG_ASSIGN_OR_RETURN(const WeightsSlice slice,
                             shards_.ReadWeights(part.shard_of_chunk[chunk], part.bucket.id, chunk,
                                                 message.slice, Now() + patience_));
    alive();
    const bool may_differ = part.bucket.update->quorum > 0;  // by which nodes came in time
    if (chunk > 0 && slice.steps != answer.steps && !may_differ) {
      return absl::FailedPreconditionError(absl::StrCat("bucket ", ToString(message.id), ": chunk ",
                                                        chunk, " has done ", slice.steps,
                                                        " steps, those before it ", answer.steps));
    }
    answer.steps = std::max(answer.steps, slice.steps);
    if (slice.values.empty()) continue;
    if (slice.values.size() != part.plan.Elems(chunk)) {
      return absl::InvalidArgumentError(
          absl::StrCat("bucket ", ToString(message.id), ": a shard gave ", slice.values.size(),
                       " values of chunk ", chunk, ", expected ", part.plan.Elems(chunk)));
    }
    std::copy(slice.values.begin(), slice.values.end(), values + part.plan.Begin(chunk));
    ++written;
  }
  if (message.slice == 0 && written > 0 && written < part.plan.Count()) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", ToString(message.id), ": the weights of ", written, " of ",
                     part.plan.Count(), " chunks have been written"));
  }
  // What was not written are zeros, of which a reader needs none if there is nothing else.
  if (written > 0) {
    answer.bytes = arena.payload_bytes();
  } else {
    THALWEG_ASSIGN_OR_RETURN(arena, BucketArena::Create("thalweg-weights", 0, true));
  }
  return std::pair(answer, std::move(arena));
}

absl::Status ServedWeights::Write(const ipc::Weights& message, UniqueFd fd, const Alive& alive) {
  THALWEG_ASSIGN_OR_RETURN(const BucketArena arena,
                           BucketArena::Open(std::move(fd), message.bytes));
  THALWEG_ASSIGN_OR_RETURN(const std::shared_ptr<NodeBucket> bucket, Find(message.id));
  const Part& part = bucket->updated_part();
  const bool is_empty = message.bytes == 0;
  if (!is_empty && message.bytes != part.Elems() * sizeof(float)) {
    return absl::InvalidArgumentError(absl::StrCat("weights of bucket ", ToString(message.id),
                                                   ": expected ", part.Elems() * sizeof(float),
                                                   " bytes, got ", message.bytes));
  }
  const auto* const values = reinterpret_cast<const float*>(arena.payload());
  for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
    WeightsSlice slice{.values = {}, .steps = message.steps};
    if (!is_empty) {
      slice.values.assign(values + part.plan.Begin(chunk), values + part.plan.Begin(chunk + 1));
    }
    THALWEG_RETURN_IF_ERROR(shards_.WriteWeights(part.shard_of_chunk[chunk], part.bucket.id, chunk,
                                                 message.slice, std::move(slice),
                                                 Now() + patience_));
    alive();
  }
  return absl::OkStatus();
}

}  // namespace thalweg
