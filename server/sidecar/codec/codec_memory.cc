#include "server/sidecar/codec/codec_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// What a half begins with.
struct HalfHead {
  uint64_t after = 0;  // the round, and one; 0: the half is not complete
  uint64_t whole_last = 0;
};
struct KeptChunk {
  uint64_t round = 0;  // 0: there is none
  uint64_t bytes = 0;
  uint64_t nonfinite_elems = 0;
};
struct KeptState {
  uint64_t rounds = 0;
  double loss_scale = kUnknownLossScale;
  uint64_t residual_elems = 0;
  uint64_t factor_elems = 0;
};

// Takes one piece of memory after another, each with a cache line of its own.
class Cursor {
 public:
  uint64_t Take(uint64_t bytes) {
    const uint64_t at = next_;
    next_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  uint64_t end() const { return next_; }

 private:
  static constexpr uint64_t kAlignment = 64;
  uint64_t next_ = 0;
};

}  // namespace

CodecMemory::Plan CodecMemory::MakePlan(DenseCodec& whole, const Codecs& codecs,
                                        uint32_t num_shards) {
  Plan plan;
  plan.num_shards = num_shards;
  Cursor places, half;
  half.Take(sizeof(HalfHead));
  const auto add = [&](Part* part, bool keeps_results) {
    PartPlan& made = plan.parts.emplace_back();
    const uint32_t chunks = part->plan.Count();
    made.part = part;
    made.place =
        places.Take(sizeof(uint64_t) + chunks * sizeof(uint64_t) + num_shards * sizeof(uint64_t));
    made.rounds = half.Take(sizeof(uint64_t));
    made.chunks = half.Take(chunks * sizeof(KeptChunk));
    for (uint32_t chunk = 0; keeps_results && chunk < chunks; ++chunk) {
      made.payloads.push_back(
          half.Take(MaxEncodedBytes(part->bucket.wire, part->plan.Elems(chunk))));
    }
  };
  add(&whole.part(), false);
  for (const auto& codec : codecs) {
    plan.codecs.push_back(codec.get());
    for (uint32_t number = 1; number < kMaxParts; ++number) {
      if (Part* const part = codec->FindPart(number); part != nullptr) add(part, true);
    }
    std::vector<StatePlan>& states = plan.states.emplace_back();
    for (size_t i = 0; i < codec->States().size(); ++i) {
      StatePlan& made = states.emplace_back();
      made.state = codec->States()[i].get();
      if (made.state == nullptr) continue;
      made.elems = codec->tensors().layout().tensors[i].Elems();
      made.head = half.Take(sizeof(KeptState));
      // A factor has at most as many elements. Pages that nobody writes to take no memory.
      made.residual = half.Take(made.elems * sizeof(float));
      made.factor = half.Take(made.elems * sizeof(float));
    }
  }
  plan.halves = places.end();
  plan.half_bytes = half.end();
  return plan;
}

absl::StatusOr<std::unique_ptr<CodecMemory>> CodecMemory::Create(DenseCodec& whole,
                                                                 const Codecs& codecs,
                                                                 uint32_t num_shards) {
  Plan plan = MakePlan(whole, codecs, num_shards);
  THALWEG_ASSIGN_OR_RETURN(
      BucketArena arena,
      BucketArena::Create("thalweg-codec-memory", plan.halves + 2 * plan.half_bytes, true));
  std::unique_ptr<CodecMemory> memory(new CodecMemory(std::move(plan), std::move(arena)));
  memory->Complete({});
  return memory;
}

void CodecMemory::KeepPlace(const Part& part, std::span<const uint32_t> shards,
                            std::span<const uint64_t> loads) {
  for (const PartPlan& plan : plan_.parts) {
    if (plan.part != &part) continue;
    uint64_t* const words = At<uint64_t>(plan.place);
    std::copy(shards.begin(), shards.end(), words + 1);
    std::copy(loads.begin(), loads.end(), words + 1 + shards.size());
    words[0] = shards.size();
  }
}

void CodecMemory::BeginRound(uint64_t round) {
  round_ = round;
  At<HalfHead>(Half(round))->after = 0;
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t k = 0; k < plan_.codecs.size(); ++k) {
    std::vector<std::span<float>> residuals;
    for (const StatePlan& plan : plan_.states[k]) residuals.push_back(PlaceOf(plan));
    plan_.codecs[k]->MakeResidualsIn(std::move(residuals));
  }
}

std::span<float> CodecMemory::PlaceOf(const StatePlan& plan) {
  if (plan.state == nullptr) return {};
  return {At<float>(Half(round_) + plan.residual), plan.elems};
}

void CodecMemory::KeepResult(const Part& part, const RoundResult& result) {
  for (const PartPlan& plan : plan_.parts) {
    if (plan.part != &part || plan.payloads.empty()) continue;
    std::byte* out = At<std::byte>(Half(round_) + plan.payloads[result.id.chunk]);
    for (const auto& piece : result.payload.pieces) {
      std::memcpy(out, piece.data(), piece.size());
      out += piece.size();
    }
    At<KeptChunk>(Half(round_) + plan.chunks)[result.id.chunk] = {
        result.id.round, result.payload.SizeBytes(), result.nonfinite_elems};
  }
}

void CodecMemory::EndRound(const std::vector<BucketCodec*>& took_part) {
  if (took_part.front() != plan_.codecs.front()) whole_last_ = round_;
  Complete(took_part);
}

void CodecMemory::KeepStates() {
  At<HalfHead>(Half(round_))->after = 0;
  std::atomic_thread_fence(std::memory_order_release);
  CompleteAnew();
}

void CodecMemory::NoteUnits() {
  for (std::array<bool, 2>& halves : residuals_) halves = {false, false};
}

void CodecMemory::CompleteAnew() {
  NoteUnits();
  Complete({});
}

void CodecMemory::Complete(const std::vector<BucketCodec*>& took_part) {
  for (const PartPlan& plan : plan_.parts) {
    *At<uint64_t>(Half(round_) + plan.rounds) = plan.part->round;
  }
  for (size_t k = 0; k < plan_.codecs.size(); ++k) {
    std::array<bool, 2>& halves = residuals_[k];
    if (std::count(took_part.begin(), took_part.end(), plan_.codecs[k]) > 0) {
      halves = {false, false};
      halves[round_ % 2] = true;
      for (const StatePlan& plan : plan_.states[k]) {
        if (plan.state == nullptr || plan.state->residual.empty()) continue;
        plan.state->residual.LieIn(PlaceOf(plan), arena_);
      }
    }
    const bool with_residual = !std::exchange(halves[round_ % 2], true);
    for (const StatePlan& plan : plan_.states[k]) KeepState(plan, with_residual);
  }
  HalfHead& head = *At<HalfHead>(Half(round_));
  head.whole_last = whole_last_;
  std::atomic_ref(head.after).store(round_ + 1, std::memory_order_release);
}

void CodecMemory::KeepState(const StatePlan& plan, bool with_residual) {
  if (plan.state == nullptr) return;
  const ParameterState& state = *plan.state;
  const Offset half = Half(round_);
  const size_t residual = std::min<uint64_t>(state.residual.size(), plan.elems);
  // A loaded factor of another size counts for nothing.
  const size_t factor = state.factor.size() > plan.elems ? 0 : state.factor.size();
  float* const place = At<float>(half + plan.residual);
  if (with_residual && state.residual.data() != place) {
    std::copy_n(state.residual.data(), residual, place);
  }
  std::copy_n(state.factor.data(), factor, At<float>(half + plan.factor));
  *At<KeptState>(half + plan.head) = {state.rounds, state.loss_scale, residual, factor};
}

absl::Status CodecMemory::Restore(const BucketArena& kept, uint64_t round) {
  if (kept.payload_bytes() != arena_->payload_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("the codecs' memory has ", kept.payload_bytes(),
                                                   " bytes, expected ", arena_->payload_bytes()));
  }
  BeginRound(round);
  const HalfHead& head = *In<HalfHead>(kept, Half(round));
  if (head.after != round + 1) {
    return absl::DataLossError(absl::StrCat("what the codecs carry on after round ", round,
                                            " was not kept: the sidecar died in between"));
  }
  whole_last_ = head.whole_last;
  for (const PartPlan& plan : plan_.parts) RestorePart(plan, kept);
  for (const std::vector<StatePlan>& states : plan_.states) {
    for (const StatePlan& plan : states) THALWEG_RETURN_IF_ERROR(RestoreState(plan, kept));
  }
  CompleteAnew();
  return absl::OkStatus();
}

void CodecMemory::RestorePart(const PartPlan& plan, const BucketArena& kept) {
  const Offset half = Half(round_);
  Part& part = *plan.part;
  part.round = *In<uint64_t>(kept, half + plan.rounds);
  const uint64_t* const words = In<uint64_t>(kept, plan.place);
  const size_t chunks = part.plan.Count();
  if (words[0] == chunks && chunks > 0) {
    const std::vector<uint32_t> shards(words + 1, words + 1 + chunks);
    KeepPlace(part, shards, {words + 1 + chunks, plan_.num_shards});
    part.shard_of_chunk = shards;
  }
  for (size_t chunk = 0; chunk < plan.payloads.size(); ++chunk) {
    const KeptChunk& known = In<KeptChunk>(kept, half + plan.chunks)[chunk];
    const uint64_t most = MaxEncodedBytes(part.bucket.wire, part.plan.Elems(chunk));
    if (known.round == 0 || known.round != part.round || known.bytes > most) continue;
    std::memcpy(At<std::byte>(half + plan.payloads[chunk]),
                In<std::byte>(kept, half + plan.payloads[chunk]), known.bytes);
    At<KeptChunk>(half + plan.chunks)[chunk] = known;
  }
}

absl::Status CodecMemory::RestoreState(const StatePlan& plan, const BucketArena& kept) {
  if (plan.state == nullptr) return absl::OkStatus();
  const Offset half = Half(round_);
  const KeptState& known = *In<KeptState>(kept, half + plan.head);
  const bool has_all = known.residual_elems == 0 || known.residual_elems == plan.elems;
  if (!has_all || known.factor_elems > plan.elems) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the codecs' memory has a residual of ", known.residual_elems, " elements and a factor of ",
        known.factor_elems, " of a parameter with ", plan.elems));
  }
  const float* const residual = In<float>(kept, half + plan.residual);
  const float* const factor = In<float>(kept, half + plan.factor);
  plan.state->residual = std::vector<float>(residual, residual + known.residual_elems);
  plan.state->factor.assign(factor, factor + known.factor_elems);
  plan.state->rounds = known.rounds;
  plan.state->loss_scale = known.loss_scale;
  return absl::OkStatus();
}

std::vector<CodecMemory::KeptPart> CodecMemory::Parts(uint32_t workers) const {
  std::vector<KeptPart> all;
  for (const PartPlan& plan : plan_.parts) {
    const Part& part = *plan.part;
    if (plan.payloads.empty() || part.shard_of_chunk.empty()) continue;
    const uint64_t* const loads =
        In<uint64_t>(*arena_, plan.place) + 1 + part.shard_of_chunk.size();
    KeptPart& kept = all.emplace_back();
    kept = {&part, part.shard_of_chunk, {loads, loads + plan_.num_shards}, {}};
    for (uint32_t chunk = 0; part.round > 0 && chunk < plan.payloads.size(); ++chunk) {
      const KeptChunk& known = In<KeptChunk>(*arena_, Half(round_) + plan.chunks)[chunk];
      RoundResult& result = kept.results.emplace_back();
      result.id = {part.bucket.id, chunk, part.round};
      result.wire = part.bucket.wire;
      result.elems = part.plan.Elems(chunk);
      result.workers = workers;
      if (known.round != part.round) continue;
      result.nonfinite_elems = known.nonfinite_elems;
      const std::shared_ptr<std::byte[]> copy =
          std::make_unique_for_overwrite<std::byte[]>(known.bytes);
      std::memcpy(copy.get(), In<std::byte>(*arena_, Half(round_) + plan.payloads[chunk]),
                  known.bytes);
      result.payload = Payload(std::span<const std::byte>(copy.get(), known.bytes), copy);
    }
  }
  return all;
}

}  // namespace thalweg
