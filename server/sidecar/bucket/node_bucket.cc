#include "server/sidecar/bucket/node_bucket.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/bucket/make_codecs.h"

namespace thalweg {

NodeBucket::NodeBucket(const ipc::RegisterBucket& announced, const std::string& owner,
                       const BucketTerms& terms, DType share, std::unique_ptr<BucketMemory> memory)
    : id_(announced.id),
      layout_(announced.layout),
      owner_(owner),
      share_(share),
      local_size_(terms.local_size),
      memory_(std::move(memory)),
      round_(id_, layout_, local_size_, memory_->result()) {}

absl::StatusOr<std::shared_ptr<NodeBucket>> NodeBucket::Create(const ipc::RegisterBucket& announced,
                                                               const std::string& owner,
                                                               const BucketTerms& terms,
                                                               uint32_t auto_choice,
                                                               ParameterStates& states) {
  const auto& [id, layout, device_memory, update] = announced;
  const DType share = ShareType(layout.dtype, terms.codec, terms.local_size, terms.path);
  THALWEG_ASSIGN_OR_RETURN(
      std::unique_ptr<BucketMemory> memory,
      terms.device->MakeMemory({id, layout, share, terms.local_size, terms.patience, terms.job}));
  std::shared_ptr<NodeBucket> bucket(
      new NodeBucket(announced, owner, terms, share, std::move(memory)));
  CodecPlace place{id, terms.chunk_bytes, terms.num_shards, terms.num_nodes == 1};
  if (update) {
    THALWEG_RETURN_IF_ERROR(Validate(*update, layout));
    place.update = update;
  }
  const CodecChoice choice{terms.codec, auto_choice};
  bucket->whole_ = MakeDenseCodec(layout, *bucket->memory_, place, choice);
  // Nothing crosses a network between the workers of one node.
  if (terms.num_nodes > 1) {
    THALWEG_ASSIGN_OR_RETURN(bucket->compressing_,
                             MakeCodecs(layout, *bucket->memory_, place, choice, states));
  }
  bucket->IndexParts();
  if (update) THALWEG_RETURN_IF_ERROR(bucket->CheckUpdated(terms));
  if (!update && terms.keeps_codecs && !bucket->compressing_.empty()) {
    THALWEG_ASSIGN_OR_RETURN(
        bucket->codec_memory_,
        CodecMemory::Create(*bucket->whole_, bucket->compressing_, terms.num_shards));
  }
  return bucket;
}

absl::Status NodeBucket::CheckUpdated(const BucketTerms& terms) {
  const auto refused = [this](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id_), what...));
  };
  if (terms.path == GradientPath::kIpc) {
    return refused(" has its weights on shards, whose results go through the host: ",
                   "a sidecar that works on GPUs cannot take them (start it with --no-gpus)");
  }
  BucketCodec& codec = updating();
  for (uint32_t number = 0; number < kMaxParts && updated_part_ == nullptr; ++number) {
    updated_part_ = codec.FindPart(number);
  }
  // A weight must always be at the same place of the same part.
  const bool is_one =
      compressing_.size() <= 1 && updated_part_ != nullptr && updated_part_->bucket.update;
  if (!is_one || !codec.HasStarted()) {
    return refused(": codec ", terms.codec.ToString(), " does not go with weights on shards, ",
                   "expected one codec for all tensors of the bucket, with one part and start=0");
  }
  if (updated_part_->bucket.layout.tensors != layout_.tensors) {
    return refused(": codec ", codec.name(), " puts padding between tensors whose weights are on ",
                   "shards, expected a bucket of one tensor");
  }
  return absl::OkStatus();
}

void NodeBucket::IndexParts() {
  const auto index = [this](BucketCodec& codec) {
    for (uint32_t number = 0; number < kMaxParts; ++number) {
      if (Part* const part = codec.FindPart(number)) parts_[number] = {&codec, part};
    }
  };
  index(*whole_);
  for (const auto& codec : compressing_) index(*codec);
}

void NodeBucket::Restore(uint64_t round, std::vector<uint32_t> shards) {
  round_.Restore(round);
  whole_->part().round = round;
  whole_->part().shard_of_chunk = std::move(shards);
}

absl::Status NodeBucket::AddInput(uint32_t local_rank, UniqueFd fd,
                                  const DeviceMemory& device_memory) {
  if (memory_->HasInput(local_rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id_), " was announced twice"));
  }
  return memory_->AddInput(local_rank, std::move(fd), device_memory);
}

absl::StatusOr<bool> NodeBucket::Submit(uint32_t local_rank, const ipc::Submit& submission,
                                        TimePoint now) {
  if (!memory_->HasInput(local_rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id_), " was submitted before it was announced"));
  }
  THALWEG_RETURN_IF_ERROR(CheckDoes(submission));
  return round_.Submit(local_rank, submission, now);
}

absl::Status NodeBucket::CheckDoes(const ipc::Submit& submission) const {
  const auto refused = [this](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id_), what...));
  };
  const bool commits = update() && update()->commits;
  const bool is_push = submission.kind == UpdateRound::kPush;
  if (!is_push && !commits) return refused(" is pulled, but its update does not commit");
  if (submission.kind == UpdateRound::kMeasure && update()->optimizer != Optimizer::kLamb) {
    return refused(" is measured, but its update is not LAMB's");
  }
  const bool updates = update() && is_push != commits;
  if (updates == (submission.settings != 0)) return absl::OkStatus();
  return refused(updates ? " was submitted without settings of its update"
                         : " was submitted with settings, but without an update");
}

void NodeBucket::BeginRound(double loss_scale) {
  std::vector<BucketCodec*> codecs;
  const bool compresses =
      !compressing_.empty() && std::all_of(compressing_.begin(), compressing_.end(),
                                           [](const auto& codec) { return codec->HasStarted(); });
  if (compresses) {
    for (const auto& codec : compressing_) codecs.push_back(codec.get());
  } else {
    codecs.push_back(whole_.get());
  }
  round_.Begin(std::move(codecs), loss_scale);
  if (codec_memory_ != nullptr) codec_memory_->BeginRound(round_.number());
}

FinishedRound NodeBucket::FinishRound(TimePoint now) {
  for (const auto& codec : compressing_) codec->CountRound();
  if (codec_memory_ != nullptr) codec_memory_->EndRound(round_.codecs());
  return round_.Finish(now);
}

std::vector<uint32_t> NodeBucket::UnfilledBy() const {
  if (!round_.is_running() || !round_.has_gradient()) return {};
  const uint32_t chunks = whole_->part().plan.Count();
  std::vector<uint32_t> unfilled;
  for (uint32_t rank = 0; rank < local_size_; ++rank) {
    if (memory_->WaitInput(rank, chunks, Now()) < chunks) unfilled.push_back(rank);
  }
  return unfilled;
}

std::pair<uint32_t, uint32_t> NodeBucket::Outstanding() const {
  std::vector<const Part*> parts;
  for (const OwnedPart& owned : parts_) {
    if (owned.part != nullptr) parts.push_back(owned.part);
  }
  return round_.Outstanding(parts);
}

}  // namespace thalweg
