#include "server/sidecar/bucket/kept_buckets.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/ipc/bucket_arena.h"
#include "server/sidecar/codec/gradient.h"

namespace thalweg {
namespace {

// Copies the last result of a bucket to where its workers look for the next one.
absl::Status RestoreResult(NodeBucket& bucket, UniqueFd fd) {
  BucketArena& here = bucket.memory().result();
  THALWEG_ASSIGN_OR_RETURN(const BucketArena kept,
                           BucketArena::Open(std::move(fd), here.payload_bytes()));
  std::memcpy(here.payload(), kept.payload(), here.payload_bytes());
  here.PublishReady(bucket.whole().part().plan.Count());
  return absl::OkStatus();
}

// Returns the last results of the bucket's chunks as the shards have sent them, or only their names
// where the bucket has gone through other codecs since: then nobody lacks them.
std::vector<RoundResult> WholeResults(NodeBucket& bucket, uint32_t workers) {
  const Part& part = bucket.whole().part();
  const DType dtype = bucket.layout().dtype;
  const DType wire = bucket.whole().wire();
  const bool is_here = bucket.codec_memory() == nullptr || bucket.codec_memory()->was_whole();
  std::vector<RoundResult> results;
  for (uint32_t chunk = 0; part.round > 0 && chunk < part.plan.Count(); ++chunk) {
    RoundResult& result = results.emplace_back();
    result.id = {bucket.id(), chunk, part.round};
    result.wire = part.bucket.wire;
    result.elems = part.plan.Elems(chunk);
    result.workers = workers;
    if (!is_here) continue;
    const size_t bytes = result.elems * SizeOf(wire);
    const std::shared_ptr<std::byte[]> values = std::make_unique_for_overwrite<std::byte[]>(bytes);
    const void* const decoded =
        bucket.memory().result().payload() + part.plan.Begin(chunk) * SizeOf(dtype);
    result.nonfinite_elems = FoldShares({decoded}, dtype, wire, result.elems, values.get());
    result.payload = Payload(std::span<const std::byte>(values.get(), bytes), values);
  }
  return results;
}

// Adds what the shards know of the bucket's codecs.
void AddParts(NodeBucket& bucket, uint32_t workers, std::vector<KeptPlaces::Bucket>& to) {
  if (bucket.codec_memory() == nullptr) return;
  for (CodecMemory::KeptPart& part : bucket.codec_memory()->Parts(workers)) {
    to.push_back({{std::move(part.shards), std::move(part.loads)},
                  part.part->bucket,
                  std::move(part.results)});
  }
}

}  // namespace

void KeptBuckets::Expect(uint32_t local_rank, uint32_t buckets) {
  MutexLock lock(mutex_);
  workers_[local_rank].expected = buckets;
  changed_.NotifyAll();
}

absl::Status KeptBuckets::Add(uint32_t local_rank, ipc::KeptBucket message, UniqueFd input) {
  MutexLock lock(mutex_);
  Worker& worker = workers_[local_rank];
  const BucketId id = message.id;
  if (worker.buckets.size() >= worker.expected.value_or(0) || worker.buckets.contains(id)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id), " was brought along twice, or beyond the ",
                     worker.expected.value_or(0), " that were announced"));
  }
  worker.buckets[id] = {std::move(message), std::move(input), UniqueFd(), UniqueFd()};
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::StatusOr<KeptBuckets::Bucket*> KeptBuckets::FindLocked(uint32_t local_rank, BucketId id,
                                                             UniqueFd Bucket::* what) {
  auto& buckets = workers_[local_rank].buckets;
  const auto found = buckets.find(id);
  if (found != buckets.end() && !(found->second.*what).valid()) return &found->second;
  return absl::InvalidArgumentError(absl::StrCat(
      "something of bucket ", ToString(id), " was brought along twice, or without the bucket"));
}

absl::Status KeptBuckets::AddResult(uint32_t local_rank, const ipc::KeptResult& result,
                                    UniqueFd arena) {
  MutexLock lock(mutex_);
  THALWEG_ASSIGN_OR_RETURN(Bucket* const bucket,
                           FindLocked(local_rank, result.id, &Bucket::result));
  if (!arena.valid() || bucket->message.round == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the result of bucket ", ToString(result.id),
                                                   " was brought along without its arena, or "
                                                   "before the first round"));
  }
  bucket->result = std::move(arena);
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status KeptBuckets::AddCodecMemory(uint32_t local_rank, const ipc::CodecMemory& memory,
                                         UniqueFd arena) {
  MutexLock lock(mutex_);
  THALWEG_ASSIGN_OR_RETURN(Bucket* const bucket,
                           FindLocked(local_rank, memory.id, &Bucket::codec_memory));
  if (!arena.valid() || !bucket->message.has_codec_memory) {
    return absl::InvalidArgumentError(
        absl::StrCat("the codecs' memory of bucket ", ToString(memory.id),
                     " was brought along without its arena, or without having been announced"));
  }
  bucket->codec_memory = std::move(arena);
  changed_.NotifyAll();
  return absl::OkStatus();
}

bool KeptBuckets::IsCompleteLocked() const {
  return std::all_of(workers_.begin(), workers_.end(), [](const Worker& worker) {
    return worker.expected == worker.buckets.size() &&
           std::all_of(worker.buckets.begin(), worker.buckets.end(), [](const auto& entry) {
             const Bucket& bucket = entry.second;
             return (bucket.message.round == 0 || bucket.result.valid()) &&
                    (!bucket.message.has_codec_memory || bucket.codec_memory.valid());
           });
  });
}

absl::Status KeptBuckets::Await(TimePoint deadline) {
  MutexLock lock(mutex_);
  const bool done =
      changed_.WaitUntil(mutex_, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return IsCompleteLocked() || !outcome_.Check().ok();
      });
  THALWEG_RETURN_IF_ERROR(outcome_.Check());
  if (done) return absl::OkStatus();
  return absl::DeadlineExceededError(
      "workers have connected to a new process of the sidecar, but not brought their buckets");
}

void KeptBuckets::Wake() {
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

absl::StatusOr<KeptBuckets::Restored> KeptBuckets::Restore(
    BucketTable& table, uint32_t world_size, const std::function<std::string(uint32_t)>& name_of) {
  std::map<BucketId, Shares> all;
  {
    MutexLock lock(mutex_);
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      for (auto& [id, bucket] : workers_[rank].buckets) all[id][rank] = std::move(bucket);
    }
  }
  Restored restored;
  for (auto& [id, shares] : all) {
    THALWEG_RETURN_IF_ERROR(RestoreBucket(shares, table, world_size, name_of, restored));
  }
  return restored;
}

absl::Status KeptBuckets::RestoreBucket(Shares& shares, BucketTable& table, uint32_t world_size,
                                        const std::function<std::string(uint32_t)>& name_of,
                                        Restored& restored) {
  std::shared_ptr<NodeBucket> bucket;
  // The worker that has heard of the latest round, and one that knows the placement.
  Bucket* latest = &shares.begin()->second;
  const Bucket* placed = latest;
  for (auto& [rank, share] : shares) {
    const ipc::RegisterBucket announced{share.message.id, share.message.layout, {}, {}};
    THALWEG_ASSIGN_OR_RETURN(
        bucket, table.Announce(rank, name_of(rank), announced, std::move(share.input)));
    if (share.message.round > latest->message.round) latest = &share;
    if (!share.message.loads.empty()) placed = &share;
  }
  const uint64_t round = latest->message.round;
  const Placement::Placed placement{placed->message.shards, placed->message.loads};
  bucket->Restore(round, placement.shards);
  THALWEG_RETURN_IF_ERROR(RestoreCodecs(shares, *bucket, round));
  const Part& whole = bucket->whole().part();
  const size_t chunks = placement.loads.empty() ? 0 : whole.plan.Count();
  const bool is_apart = std::any_of(shares.begin(), shares.end(), [round](const auto& share) {
    return share.second.message.round + 1 < round;
  });
  if (is_apart || placement.shards.size() != chunks ||
      (whole.round > 0 && placement.loads.empty())) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(bucket->id()),
                                                   ": workers have kept results that are more "
                                                   "than a round apart, or not where its ",
                                                   chunks, " chunks are summed"));
  }
  if (round > 0) THALWEG_RETURN_IF_ERROR(RestoreResult(*bucket, std::move(latest->result)));
  for (const auto& [rank, share] : shares) {
    std::optional<ipc::Complete> missed;
    if (share.message.round < round) {
      missed = ipc::Complete{.id = bucket->id(),
                             .round = round,
                             .workers = world_size,
                             .nonfinite_elems = latest->message.nonfinite_elems};
    }
    restored.answers.push_back({rank, bucket, std::move(missed)});
  }
  if (!placement.loads.empty()) {
    restored.buckets.push_back({placement, whole.bucket, WholeResults(*bucket, world_size)});
  }
  AddParts(*bucket, world_size, restored.buckets);
  return absl::OkStatus();
}

absl::Status KeptBuckets::RestoreCodecs(Shares& shares, NodeBucket& bucket, uint64_t round) {
  CodecMemory* const memory = bucket.codec_memory();
  if (memory == nullptr && bucket.compressing().empty()) return absl::OkStatus();
  for (auto& [rank, share] : shares) {
    if (memory == nullptr || !share.codec_memory.valid()) continue;
    THALWEG_ASSIGN_OR_RETURN(
        const BucketArena kept,
        BucketArena::Open(std::move(share.codec_memory), memory->arena().payload_bytes()));
    return memory->Restore(kept, round);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the sidecar has been restarted, and what the codecs of bucket ",
                   ToString(bucket.id()), " carried from round to round was not kept"));
}

}  // namespace thalweg
