#include "server/sidecar/node_bucket.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/codec/make_codecs.h"

namespace thalweg {

NodeBucket::NodeBucket(BucketId bucket_id, const BucketLayout& bucket_layout,
                       const BucketTerms& terms)
    : id(bucket_id),
      layout(bucket_layout),
      share(ShareType(layout.dtype, terms.codec, terms.local_size, terms.path)),
      submitted(terms.local_size) {}

absl::StatusOr<std::shared_ptr<NodeBucket>> NodeBucket::Create(
    BucketId id, const BucketLayout& layout, const std::string& owner, const BucketTerms& terms,
    uint32_t auto_choice, ParameterStates& states) {
  std::shared_ptr<NodeBucket> bucket(new NodeBucket(id, layout, terms));
  bucket->owner = owner;
  THALWEG_ASSIGN_OR_RETURN(
      bucket->memory,
      terms.device->MakeMemory({id, layout, bucket->share, terms.local_size, terms.patience}));
  const CodecPlace place{id, terms.chunk_bytes, terms.num_shards, terms.num_nodes == 1};
  const CodecChoice choice{terms.codec, auto_choice};
  bucket->dense = MakeDenseCodec(layout, *bucket->memory, place, choice);
  // Nothing crosses a network between the workers of one node.
  if (terms.num_nodes > 1) {
    THALWEG_ASSIGN_OR_RETURN(bucket->codecs,
                             MakeCodecs(layout, *bucket->memory, place, choice, states));
  }
  return bucket;
}

absl::Status NodeBucket::AddInput(uint32_t local_rank, UniqueFd fd,
                                  const DeviceMemory& device_memory) {
  if (memory->HasInput(local_rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id), " was announced twice"));
  }
  return memory->AddInput(local_rank, std::move(fd), device_memory);
}

absl::StatusOr<bool> NodeBucket::Submit(uint32_t local_rank, uint64_t submitted_round,
                                        TimePoint now) {
  if (!memory->HasInput(local_rank)) {
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
  compressed = !codecs.empty() && std::all_of(codecs.begin(), codecs.end(), [](const auto& codec) {
    return codec->HasStarted();
  });
  if (!compressed) dense->part().BeginRound();
  for (BucketCodec* codec : CodecsInUse()) codec->traffic = {};
  codecs_left = CodecsInUse().size();
  finished_chunks = 0;
  workers = 0;
  reduce_time = Duration::zero();
  wait_time = now - first_submit;
  decode_time = Duration::zero();
  first_sent.reset();
  THALWEG_RETURN_IF_ERROR(memory->BeginRound());
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

std::vector<uint32_t> NodeBucket::UnfilledBy() const {
  const uint32_t chunks = dense->part().plan.Count();
  std::vector<uint32_t> unfilled;
  for (uint32_t rank = 0; rank < submitted.size(); ++rank) {
    if (memory->WaitInput(rank, chunks, Now()) < chunks) unfilled.push_back(rank);
  }
  return unfilled;
}

BucketCodec* NodeBucket::FindCodec(uint32_t part) {
  if (part == 0) return dense.get();
  for (const auto& codec : codecs) {
    if (codec->FindPart(part) != nullptr) return codec.get();
  }
  return nullptr;
}

std::vector<BucketCodec*> NodeBucket::CodecsInUse() {
  if (!compressed) return {dense.get()};
  std::vector<BucketCodec*> in_use;
  for (const auto& codec : codecs) in_use.push_back(codec.get());
  return in_use;
}

bool NodeBucket::FinishChunk(Part& part, const RoundResult& received) {
  // Whoever waits for the result takes its counter for a sign of life.
  memory->result().PublishReady(++finished_chunks);
  return part.FinishChunk(received);
}

bool NodeBucket::FinishCodec(const Part& last) {
  workers = last.workers;
  return --codecs_left == 0;
}

void NodeBucket::FinishRound(TimePoint now) {
  wire_time = first_sent ? now - *first_sent : Duration::zero();
  ready = false;
  num_submitted = 0;
  submitted.assign(submitted.size(), false);
  for (const auto& codec : codecs) codec->CountRound();
}

std::pair<uint32_t, uint32_t> NodeBucket::Outstanding() {
  uint32_t missing = 0;
  uint32_t chunks = 0;
  for (uint32_t number = 0; number < kMaxParts; ++number) {
    BucketCodec* codec = FindCodec(number);
    const Part* part = codec == nullptr ? nullptr : codec->FindPart(number);
    if (part == nullptr || !part->in_flight) continue;
    missing += part->plan.Count() - part->finished_chunks;
    chunks += part->plan.Count();
  }
  return {missing, chunks};
}

}  // namespace thalweg
