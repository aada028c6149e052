// CodecMemory has what another process of the sidecar needs to take up a bucket that codecs
// compress: the states that they carry from round to round, how many rounds each part has had, and
// the shards' last results of the parts. A worker holds the memory, so that it outlives this
// process.
//
//   places   of each part: which shard sums each chunk
//   half 0   as it is after a round with an even number: counts, states, results
//   half 1   the same after an odd one
//
// A round writes to one half, and what the next process needs if the round does not complete stays
// in the other. The layout follows from the codecs alone; like messages it belongs to kIpcVersion.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/exchange/rounds.h"
#include "core/ipc/bucket_arena.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/part.h"

namespace thalweg {

// Thread-compatible, but for KeepResult.
class CodecMemory {
 public:
  using Codecs = std::vector<std::unique_ptr<BucketCodec>>;

  // Makes the memory of a bucket that goes through `codecs` once they have started, and through
  // `whole` until then; they must outlive it. It has their states, as those after round 0.
  // ResourceExhausted: there is no memory, or no descriptor.
  static absl::StatusOr<std::unique_ptr<CodecMemory>> Create(DenseCodec& whole,
                                                             const Codecs& codecs,
                                                             uint32_t num_shards);

  const BucketArena& arena() const { return *arena_; }

  // The shards know a part: by chunk which sums it, and by shard how many bytes these are.
  void KeepPlace(const Part& part, std::span<const uint32_t> shards,
                 std::span<const uint64_t> loads);
  // Makes codecs leave residuals in the half of that round.
  void BeginRound(uint64_t round);
  // A chunk of the round in flight has this result. Any thread, one for a chunk. Results of `whole`
  // are not kept: they lie where the workers look for them.
  void KeepResult(const Part& part, const RoundResult& result);
  // The round, in which these took part, is over: completes its half, where their residuals lie
  // now.
  void EndRound(const std::vector<BucketCodec*>& took_part);
  // Between two rounds: the states have changed.
  void KeepStates();
  // Between two rounds: the states may be in other units now. What is kept of them is as good.
  void NoteUnits();

  // Sets codecs and parts to what they were after that round, from another process's memory, and
  // keeps that. Before the first round. DataLoss: it has no such round; InvalidArgument: it is
  // not the memory of such a bucket.
  absl::Status Restore(const BucketArena& kept, uint64_t round);
  // Returns whether the last round went through `whole`.
  bool was_whole() const { return whole_last_ == round_; }
  // A part that the shards know, with the last result of each of its chunks.
  struct KeptPart {
    const Part* part = nullptr;
    std::vector<uint32_t> shards;
    std::vector<uint64_t> loads;
    std::vector<RoundResult> results;
  };
  // Returns all but that of `whole`. All nodes have a result that is missing here, since the bucket
  // has had another round: there only its round is named. `workers` have taken part in each.
  std::vector<KeptPart> Parts(uint32_t workers) const;

 private:
  // Where something lies: from the memory's begin, or from that of a half.
  using Offset = uint64_t;
  struct PartPlan {
    Part* part = nullptr;
    Offset place = 0;   // chunks that are placed: 0 or all; then the shards; then the loads
    Offset rounds = 0;  // in a half
    Offset chunks = 0;  // in a half: a KeptChunk each
    std::vector<Offset> payloads;
  };
  struct StatePlan {
    ParameterState* state = nullptr;
    uint64_t elems = 0;
    Offset head = 0;  // in a half: a KeptState; then the residual, and the factor
    Offset residual = 0;
    Offset factor = 0;
  };
  struct Plan {
    std::vector<BucketCodec*> codecs;
    std::vector<PartPlan> parts;                 // the first one is that of `whole`
    std::vector<std::vector<StatePlan>> states;  // by codec, and tensor
    Offset halves = 0;                           // of the first half
    uint64_t half_bytes = 0;
    uint64_t num_shards = 0;
  };
  CodecMemory(Plan plan, BucketArena arena)
      : plan_(std::move(plan)),
        arena_(std::make_shared<BucketArena>(std::move(arena))),
        residuals_(plan_.codecs.size()) {}

  static Plan MakePlan(DenseCodec& whole, const Codecs& codecs, uint32_t num_shards);
  Offset Half(uint64_t round) const { return plan_.halves + round % 2 * plan_.half_bytes; }
  template <typename T>
  T* At(Offset offset) {
    return reinterpret_cast<T*>(arena_->payload() + offset);
  }
  template <typename T>
  static const T* In(const BucketArena& arena, Offset offset) {
    return reinterpret_cast<const T*>(arena.payload() + offset);
  }
  // Completes the half of round_. These codecs have left residuals there.
  void Complete(const std::vector<BucketCodec*>& took_part);
  // The same when they have all changed otherwise.
  void CompleteAnew();
  std::span<float> PlaceOf(const StatePlan& plan);  // of its residual in that half
  void KeepState(const StatePlan& plan, bool with_residual);
  absl::Status RestoreState(const StatePlan& plan, const BucketArena& kept);
  void RestorePart(const PartPlan& plan, const BucketArena& kept);

  const Plan plan_;
  const std::shared_ptr<BucketArena> arena_;    // outlives this while residuals lie in it
  uint64_t round_ = 0;                          // in flight, or the last one
  uint64_t whole_last_ = 0;                     // the last one that went through `whole`
  std::vector<std::array<bool, 2>> residuals_;  // by codec: which halves have its residuals of now
};

}  // namespace thalweg
