#include "server/sidecar/node_bucket.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/codec/dense.h"
#include "server/sidecar/codec/make_codecs.h"

namespace thalweg {

NodeBucket::NodeBucket(BucketId id, const BucketLayout& layout, const std::string& owner,
                       const BucketTerms& terms)
    : id_(id),
      layout_(layout),
      owner_(owner),
      share_(ShareType(layout.dtype, terms.codec, terms.local_size, terms.path)),
      local_size_(terms.local_size),
      round_(id, terms.local_size) {}

absl::StatusOr<std::shared_ptr<NodeBucket>> NodeBucket::Create(const ipc::RegisterBucket& announced,
                                                               const std::string& owner,
                                                               const BucketTerms& terms,
                                                               uint32_t auto_choice,
                                                               ParameterStates& states) {
  const auto& [id, layout, memory, update] = announced;
  std::shared_ptr<NodeBucket> bucket(new NodeBucket(id, layout, owner, terms));
  THALWEG_ASSIGN_OR_RETURN(
      bucket->memory_,
      terms.device->MakeMemory({id, layout, bucket->share_, terms.local_size, terms.patience}));
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
  if (update) THALWEG_RETURN_IF_ERROR(bucket->CheckUpdated(terms));
  return bucket;
}

absl::Status NodeBucket::CheckUpdated(const BucketTerms& terms) {
  const auto refused = [this](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id_), what...));
  };
  if (terms.path == GradientPath::kIpc) {
    return refused(" has its weights on shards, whose results go through the host: ",
                   "a sidecar that works on GPUs cannot take them (start it without --cuda)");
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

BucketCodec* NodeBucket::FindCodec(uint32_t part) {
  if (part == 0) return whole_.get();
  for (const auto& codec : compressing_) {
    if (codec->FindPart(part) != nullptr) return codec.get();
  }
  return nullptr;
}

absl::Status NodeBucket::AddInput(uint32_t local_rank, UniqueFd fd,
                                  const DeviceMemory& device_memory) {
  if (memory_->HasInput(local_rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id_), " was announced twice"));
  }
  return memory_->AddInput(local_rank, std::move(fd), device_memory);
}

absl::StatusOr<bool> NodeBucket::Submit(uint32_t local_rank, uint64_t round, TimePoint now) {
  if (!memory_->HasInput(local_rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(id_), " was submitted before it was announced"));
  }
  MutexLock lock(mutex_);
  return round_.Submit(local_rank, round, now);
}

absl::Status NodeBucket::NoteUnused(const std::vector<uint32_t>& tensors) {
  if (tensors.empty()) return absl::OkStatus();
  MutexLock lock(mutex_);
  num_unused_.resize(layout_.tensors.size());
  for (const uint32_t tensor : tensors) {
    if (tensor >= num_unused_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id_), ": tensor ", tensor,
                                                     " is unused, but there are ",
                                                     num_unused_.size()));
    }
    ++num_unused_[tensor];
  }
  return absl::OkStatus();
}

absl::Status NodeBucket::NoteUpdate(uint64_t settings, UpdateRound kind) {
  const auto refused = [this](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id_), what...));
  };
  const bool commits = update() && update()->commits;
  const bool is_push = kind == UpdateRound::kPush;
  if (!is_push && !commits) return refused(" is pulled, but its update does not commit");
  if (kind == UpdateRound::kMeasure && update()->optimizer != Optimizer::kLamb) {
    return refused(" is measured, but its update is not LAMB's");
  }
  const bool updates = update() && is_push != commits;
  if (updates != (settings != 0)) {
    return refused(updates ? " was submitted without settings of its update"
                           : " was submitted with settings, but without an update");
  }
  const Doing doing{settings, kind};
  MutexLock lock(mutex_);
  if (next_ && *next_ != doing) {
    return refused(": workers of this node submitted it with settings ", next_->settings, " and ",
                   settings, " (whose number rises where a learning rate or the like changes)");
  }
  next_ = doing;
  return absl::OkStatus();
}

uint64_t NodeBucket::settings() const {
  MutexLock lock(mutex_);
  return now_.settings;
}

bool NodeBucket::has_gradient() const {
  MutexLock lock(mutex_);
  return now_.kind == UpdateRound::kPush;
}

absl::Status NodeBucket::TakeSquares(const Part& part, const RoundResult& received) {
  const uint64_t first = GranulesIn(layout_, 0, part.plan.Begin(received.id.chunk));
  const uint64_t count = received.elems / part.NumSquares();
  std::vector<double> squares(received.elems);
  THALWEG_RETURN_IF_ERROR(DecodePayload(received.payload, DType::kFloat64, DType::kFloat64,
                                        received.elems, squares.data()));
  MutexLock lock(mutex_);
  const uint64_t of_bucket = squares_.size() / part.NumSquares();
  for (uint64_t i = 0; i < squares.size(); ++i) {
    squares_[i / count * of_bucket + first + i % count] = squares[i];
  }
  return absl::OkStatus();
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
  MutexLock lock(mutex_);
  unused_.assign(num_unused_.size(), false);
  for (size_t i = 0; i < unused_.size(); ++i) unused_[i] = num_unused_[i] == local_size_;
  num_unused_.clear();
  now_ = next_.value_or(Doing());
  next_.reset();
  squares_.clear();
  round_.Begin(std::move(codecs), loss_scale);
}

std::vector<bool> NodeBucket::unused() const {
  MutexLock lock(mutex_);
  return unused_;
}

double NodeBucket::loss_scale() const {
  MutexLock lock(mutex_);
  return round_.loss_scale();
}

std::vector<BucketCodec*> NodeBucket::CodecsInUse() const {
  MutexLock lock(mutex_);
  return round_.codecs();
}

void NodeBucket::BeginPart(Part& part) {
  MutexLock lock(mutex_);
  part.BeginRound(now_.kind);
  if (part.gives_squares()) {
    squares_.assign(part.NumSquares() * GranulesIn(layout_, 0, layout_.Elems()), 0);
  }
}

void NodeBucket::NoteSent(BucketCodec& codec, Part& part, uint32_t chunk, uint64_t bytes,
                          Duration encoding, TimePoint now) {
  MutexLock lock(mutex_);
  round_.AddReduceTime(encoding);
  round_.NoteSent(codec, part, chunk, bytes, now);
}

absl::StatusOr<TimePoint> NodeBucket::Claim(Part& part, const RoundResult& received) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(part.Claim(received));
  return part.sent[received.id.chunk];
}

bool NodeBucket::FinishChunk(BucketCodec& codec, Part& part, const RoundResult& received,
                             Duration decoding) {
  MutexLock lock(mutex_);
  round_.AddDecodeTime(decoding);
  const bool is_last = round_.FinishChunk(codec, part, received);
  // Whoever waits for the result takes its counter for a sign of life.
  memory_->result().PublishReady(round_.finished_chunks());
  return is_last;
}

bool NodeBucket::FinishCodec(const Part& last) {
  MutexLock lock(mutex_);
  return round_.FinishCodec(last);
}

FinishedRound NodeBucket::FinishRound(TimePoint now) {
  MutexLock lock(mutex_);
  for (const auto& codec : compressing_) codec->CountRound();
  FinishedRound finished = round_.Finish(now);
  finished.message.squares = std::exchange(squares_, {});
  return finished;
}

void NodeBucket::AddReduceTime(Duration time) {
  MutexLock lock(mutex_);
  round_.AddReduceTime(time);
}

void NodeBucket::AddWaitTime(Duration time) {
  MutexLock lock(mutex_);
  round_.AddWaitTime(time);
}

bool NodeBucket::in_flight() const {
  MutexLock lock(mutex_);
  return round_.in_flight();
}

bool NodeBucket::is_running() const {
  MutexLock lock(mutex_);
  return round_.is_running();
}

uint64_t NodeBucket::round() const {
  MutexLock lock(mutex_);
  return round_.number();
}

NodeBucket::Waiting NodeBucket::waiting() const {
  MutexLock lock(mutex_);
  return {round_.number(), round_.MissingWorkers(), round_.first_submit(), round_.is_running(),
          round_.ready_since()};
}

std::vector<uint32_t> NodeBucket::UnfilledBy() const {
  if (!is_running() || !has_gradient()) return {};
  const uint32_t chunks = whole_->part().plan.Count();
  std::vector<uint32_t> unfilled;
  for (uint32_t rank = 0; rank < local_size_; ++rank) {
    if (memory_->WaitInput(rank, chunks, Now()) < chunks) unfilled.push_back(rank);
  }
  return unfilled;
}

std::pair<uint32_t, uint32_t> NodeBucket::Outstanding() {
  MutexLock lock(mutex_);
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
