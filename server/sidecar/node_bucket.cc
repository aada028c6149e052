#include "server/sidecar/node_bucket.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

NodeBucket::NodeBucket(BucketId bucket_id, const BucketLayout& bucket_layout,
                       const BucketTerms& terms)
    : id(bucket_id),
      layout(bucket_layout),
      share(ShareType(layout.dtype, terms.codec, terms.local_size)),
      dense(id, layout, FormatOf(DenseType(layout.dtype, terms.codec)), terms.chunk_bytes,
            terms.num_shards),
      inputs(terms.local_size),
      submitted(terms.local_size) {}

absl::StatusOr<std::shared_ptr<NodeBucket>> NodeBucket::Create(BucketId id,
                                                               const BucketLayout& layout,
                                                               const std::string& owner,
                                                               const BucketTerms& terms,
                                                               MatrixStates& matrices) {
  std::shared_ptr<NodeBucket> bucket(new NodeBucket(id, layout, terms));
  bucket->owner = owner;
  THALWEG_ASSIGN_OR_RETURN(bucket->result,
                           BucketArena::Create("thalweg-result", bucket->RawBytes(), true));
  bucket->dense.receive = bucket->result->payload();
  if (terms.local_size > 1 || bucket->share != bucket->dense.WireType()) {
    bucket->encoded = std::make_unique_for_overwrite<std::byte[]>(bucket->dense.WireBytes());
    bucket->dense.send = bucket->encoded.get();
  }
  // Nothing crosses a network between the workers of one node.
  if (terms.codec.kind == CodecKind::kPowerSgd && terms.num_nodes > 1) {
    THALWEG_ASSIGN_OR_RETURN(bucket->power_sgd,
                             PowerSgd::Create(bucket->dense, terms.codec, terms.chunk_bytes,
                                              terms.num_shards, matrices));
  }
  return bucket;
}

absl::Status NodeBucket::AddInput(uint32_t local_rank, UniqueFd fd) {
  if (inputs[local_rank].has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id), " was announced twice"));
  }
  THALWEG_ASSIGN_OR_RETURN(inputs[local_rank],
                           BucketArena::Open(std::move(fd), dense.Elems() * SizeOf(share)));
  if (encoded == nullptr) dense.send = std::as_const(*inputs[local_rank]).payload();
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
  compressed = power_sgd != nullptr && power_sgd->HasStarted();
  if (!compressed) dense.BeginRound();
  finished_chunks = 0;
  workers = 0;
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

Part* NodeBucket::FindPart(uint32_t part) {
  if (part == 0) return &dense;
  return power_sgd == nullptr ? nullptr : power_sgd->FindPart(part);
}

bool NodeBucket::FinishChunk(Part& part, const RoundResult& received) {
  // Whoever waits for the result takes its counter for a sign of life.
  result->PublishReady(++finished_chunks);
  return part.FinishChunk(received);
}

void NodeBucket::FinishRound(const Part& last, TimePoint now) {
  workers = last.workers;
  wire_time = first_sent ? now - *first_sent : Duration::zero();
  ready = false;
  num_submitted = 0;
  submitted.assign(submitted.size(), false);
  if (power_sgd != nullptr) power_sgd->CountRound();
}

std::pair<uint32_t, uint32_t> NodeBucket::Outstanding() {
  for (uint32_t number = 0; number < kMaxParts; ++number) {
    const Part* part = FindPart(number);
    if (part == nullptr || !part->in_flight) continue;
    return {part->plan.Count() - part->finished_chunks, part->plan.Count()};
  }
  return {0, 0};
}

std::vector<const void*> NodeBucket::Shares(uint64_t begin) const {
  std::vector<const void*> shares;
  shares.reserve(inputs.size());
  for (const auto& input : inputs) shares.push_back(input->payload() + begin * SizeOf(share));
  return shares;
}

Payload NodeBucket::EncodedShare(const Part& part, uint32_t chunk) {
  const size_t size = SizeOf(part.WireType());
  return Payload({part.send + part.plan.Begin(chunk) * size, part.plan.Elems(chunk) * size},
                 shared_from_this());
}

}  // namespace thalweg
