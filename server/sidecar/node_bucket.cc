#include "server/sidecar/node_bucket.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

absl::StatusOr<std::shared_ptr<NodeBucket>> NodeBucket::Create(
    BucketId id, const BucketLayout& layout, const std::string& owner, DType codec,
    uint64_t chunk_bytes, uint32_t num_shards, uint32_t local_size) {
  auto bucket = std::make_shared<NodeBucket>();
  bucket->id = id;
  bucket->layout = layout;
  bucket->owner = owner;
  bucket->share = ShareType(layout.dtype, codec, local_size);
  bucket->wire = WireType(layout.dtype, codec);
  bucket->plan = ChunkPlan::For(layout.Elems(), layout.dtype, chunk_bytes, num_shards);
  bucket->inputs.resize(local_size);
  bucket->submitted.resize(local_size);
  THALWEG_ASSIGN_OR_RETURN(
      bucket->result,
      BucketArena::Create("thalweg-result", layout.Elems() * SizeOf(layout.dtype), true));
  if (local_size > 1) {
    bucket->encoded =
        std::make_unique_for_overwrite<std::byte[]>(layout.Elems() * SizeOf(bucket->wire));
  }
  return bucket;
}

absl::Status NodeBucket::AddInput(uint32_t local_rank, UniqueFd fd) {
  if (inputs[local_rank].has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id), " was announced twice"));
  }
  THALWEG_ASSIGN_OR_RETURN(inputs[local_rank],
                           BucketArena::Open(std::move(fd), plan.total_elems * SizeOf(share)));
  return absl::OkStatus();
}

absl::StatusOr<bool> NodeBucket::Submit(uint32_t local_rank, uint64_t submitted_round,
                                        TimePoint now) {
  if (!inputs[local_rank].has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id), " was submitted before it was announced"));
  }
  if (ready || submitted_round != round + 1 || submitted[local_rank]) {
    return absl::InvalidArgumentError(absl::StrCat(
        "bucket ", ToString(id), ": round ", submitted_round, " was submitted, but round ", round,
        ready ? " is in flight" : " was the last"));
  }
  if (num_submitted == 0) first_submit = now;
  submitted[local_rank] = true;
  if (++num_submitted < submitted.size()) return false;

  ++round;
  ready = true;
  ready_since = now;
  claimed.assign(plan.Count(), false);
  finished_chunks = 0;
  workers = 0;
  nonfinite_elems = 0;
  reduce_time = Duration::zero();
  wait_time = now - first_submit;
  first_sent.reset();
  result->ResetReady();
  return true;
}

std::vector<uint32_t> NodeBucket::MissingWorkers() const {
  std::vector<uint32_t> missing;
  if (ready || num_submitted == 0) return missing;
  for (uint32_t rank = 0; rank < submitted.size(); ++rank) {
    if (!submitted[rank]) missing.push_back(rank);
  }
  return missing;
}

std::vector<const void*> NodeBucket::Shares(uint32_t chunk) const {
  std::vector<const void*> shares;
  shares.reserve(inputs.size());
  for (const auto& input : inputs) {
    shares.push_back(input->payload() + plan.Begin(chunk) * SizeOf(share));
  }
  return shares;
}

Payload NodeBucket::EncodedShare(uint32_t chunk) {
  const std::byte* whole = encoded != nullptr ? encoded.get() : std::as_const(*inputs[0]).payload();
  const size_t size = SizeOf(wire);
  return Payload({whole + plan.Begin(chunk) * size, plan.Elems(chunk) * size}, shared_from_this());
}

absl::Status NodeBucket::Claim(const RoundResult& r) {
  if (!ready || r.id.round != round || r.id.chunk >= plan.Count() || r.wire != wire ||
      r.elems != plan.Elems(r.id.chunk)) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", r.elems, " ", Name(r.wire), " values for chunk ", r.id.chunk,
                     ", round ", r.id.round, " of bucket ", ToString(id), ", whose round ", round,
                     ready ? " is in flight" : " is complete"));
  }
  if (claimed[r.id.chunk]) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", r.id.chunk, " of bucket ", ToString(id), " came twice"));
  }
  claimed[r.id.chunk] = true;
  return absl::OkStatus();
}

bool NodeBucket::FinishChunk(const RoundResult& received, TimePoint now) {
  workers = received.workers;
  nonfinite_elems += received.nonfinite_elems;
  result->PublishReady(++finished_chunks);
  if (finished_chunks < plan.Count()) return false;
  FinishRound(now);
  return true;
}

void NodeBucket::FinishRound(TimePoint now) {
  wire_time = first_sent ? now - *first_sent : Duration::zero();
  ready = false;
  num_submitted = 0;
  submitted.assign(submitted.size(), false);
}

}  // namespace thalweg
