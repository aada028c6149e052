#include "server/sidecar/bucket/codec_states.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/bucket/shard_residuals.h"

namespace thalweg {

absl::StatusOr<std::shared_ptr<NodeBucket>> CodecStates::MakeBucket(
    const Buckets& buckets, const ipc::RegisterBucket& announced, const std::string& owner,
    const BucketTerms& terms, uint32_t auto_choice) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(CollectLocked(buckets));
  return NodeBucket::Create(announced, owner, terms, auto_choice, states_);
}

void CodecStates::AwaitUse() { MutexLock lock(mutex_); }

absl::Status CodecStates::CheckIdle(const Buckets& buckets) {
  for (const auto& bucket : buckets) {
    if (!bucket->round().in_flight()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("codec state was asked for or loaded while round ", bucket->round().number(),
                     " of bucket ", ToString(bucket->id()), " was in flight"));
  }
  return absl::OkStatus();
}

absl::Status CodecStates::CollectLocked(const Buckets& buckets) {
  for (const auto& bucket : buckets) {
    // Its codecs share no parameter with those of a bucket that is being announced.
    if (bucket->round().in_flight()) continue;
    for (const auto& codec : bucket->compressing()) {
      THALWEG_RETURN_IF_ERROR(codec->SaveStates());
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<BucketArena> CodecStates::Save(const Buckets& buckets, ShardGroup* shards,
                                              Duration timeout, const Alive& alive) {
  ParameterStates states;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckIdle(buckets));
    THALWEG_RETURN_IF_ERROR(CollectLocked(buckets));
    // In place, so that this job goes on with the bits of one that loads the states.
    ToTrueUnits(states_);
    for (const auto& bucket : buckets) {
      if (bucket->codec_memory() != nullptr) bucket->codec_memory()->NoteUnits();
    }
    states = states_;
  }
  // The asking worker's thread is here, and no round can begin without that worker: the states
  // rest, here and at the shards.
  std::vector<BucketCodec*> read;
  for (const auto& bucket : buckets) {
    for (const auto& codec : bucket->compressing()) {
      // What has been loaded, or moved here, the shards get in the next round only.
      if (shards == nullptr || codec->keeps_shard_residuals()) continue;
      read.push_back(codec.get());
      THALWEG_RETURN_IF_ERROR(ReadShardResiduals(*shards, *codec, timeout, alive));
    }
  }
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena,
                           BucketArena::Create("thalweg-codec-state", EncodedBytes(states), true));
  Encode(states, {arena.payload(), arena.payload_bytes()});
  for (BucketCodec* const codec : read) codec->ForgetShardResiduals();
  return arena;
}

absl::Status CodecStates::MoveShardResiduals(const Buckets& buckets, uint32_t generation,
                                             ShardGroup& shards, Duration timeout,
                                             const Alive& alive) {
  MutexLock lock(mutex_);
  // As in Save, the states rest; but for those of buckets in flight, which keep their layout.
  for (const auto& bucket : buckets) {
    if (bucket->id().generation >= generation || bucket->round().in_flight()) continue;
    // What shards have had since then, for other buckets, is newer.
    if (!moved_.insert(bucket->id()).second) continue;
    for (const auto& codec : bucket->compressing()) {
      if (codec->keeps_shard_residuals()) continue;
      THALWEG_RETURN_IF_ERROR(ReadShardResiduals(shards, *codec, timeout, alive));
    }
  }
  return absl::OkStatus();
}

absl::Status CodecStates::Load(const Buckets& buckets, const BucketArena& arena,
                               bool is_first_node) {
  THALWEG_ASSIGN_OR_RETURN(ParameterStates loaded,
                           DecodeParameterStates({arena.payload(), arena.payload_bytes()}));
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(CheckIdle(buckets));
  THALWEG_RETURN_IF_ERROR(CollectLocked(buckets));
  THALWEG_RETURN_IF_ERROR(Replace(states_, std::move(loaded)));
  for (const auto& bucket : buckets) {
    if (bucket->codec_memory() != nullptr) bucket->codec_memory()->KeepStates();
    if (!is_first_node) continue;
    for (const auto& codec : bucket->compressing()) {
      const Part* const part = codec->PartWithShardResiduals();
      if (part != nullptr && part->round > 0) codec->ZeroShardResiduals();
    }
  }
  return absl::OkStatus();
}

}  // namespace thalweg
