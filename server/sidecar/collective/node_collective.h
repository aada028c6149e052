// One collective on one node: what its workers give, what they get, and which chunks are under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/base/mutex.h"
#include "core/base/payload.h"
#include "core/exchange/rounds.h"
#include "core/ipc/message.h"
#include "server/sidecar/collective/arenas.h"
#include "server/sidecar/collective/collective_plan.h"
#include "server/sidecar/collective/collective_text.h"
#include "server/sidecar/collective/node_values.h"
#include "server/sidecar/collective/parts_count.h"
#include "server/sidecar/job/job_outcome.h"

namespace thalweg {

// Gathers its workers in any order; then one thread at a time sends its chunks in order, while
// results come from any thread.
class NodeCollective {
 public:
  // `first` is the message of the first worker that came, `rank` its rank in the group.
  // `on_released` is called when nothing refers to the values any more, be it after the collective
  // is gone.
  NodeCollective(uint32_t rank, const ipc::Collect& first, std::string group_name,
                 std::shared_ptr<const GroupPlaces> places, NodeValues::OnReleased on_released,
                 TimePoint now);

  const ipc::Collect& spec() const { return spec_; }  // without values
  // Returns e.g. "allreduce 7 of group 'default'".
  std::string Name() const { return NameOf(spec_, group_name_); }

  // Takes what a worker gives. InvalidArgument: it says another thing than the first worker, or
  // gives too few bytes.
  absl::Status Add(uint32_t rank, const ipc::Collect& message, uint64_t arena_bytes,
                   GivenValues values);
  bool IsGathered() const { return given_ == places_->here().size(); }
  std::vector<uint32_t> Missing() const;  // ranks on this node that have not come
  TimePoint since() const { return since_; }
  // Returns whether no values are in arenas, and the result needs none.
  bool IsSmall() const;
  uint64_t result_size() const { return plan_.result_units * unit_bytes(); }

  // Cuts the values into chunks, when all have come. `shards_of` returns the shard of each chunk of
  // a route. `result` is for results of more than kMaxInlineBytes.
  using ShardsOf = std::function<std::vector<uint32_t>(const Route&, const ChunkPlan&)>;
  void Begin(uint64_t chunk_bytes, uint32_t num_shards, const ShardsOf& shards_of,
             std::shared_ptr<ResultArena> result);

  uint32_t num_chunks() const { return static_cast<uint32_t>(chunks_.size()); }
  uint32_t ShardOf(uint32_t chunk) const { return chunks_[chunk].shard; }
  // Returns false for a chunk that stays on the node.
  bool Crosses(uint32_t chunk) const { return !RouteOf(chunk).stays; }
  // Returns what this node contributes for a chunk, folding what its workers give. Waits until that
  // is there.
  absl::StatusOr<Contribution> MakeContribution(uint32_t chunk, const JobOutcome& outcome);
  // Does the same for a chunk that stays, and puts it into the result.
  absl::Status Keep(uint32_t chunk, const JobOutcome& outcome);
  // Takes a result. InvalidArgument, FailedPrecondition: there is no such chunk, or it has come.
  absl::Status TakeResult(const RoundResult& received);
  // The chunk is done. Returns true for the last one.
  bool FinishChunk();
  uint32_t remaining() const;  // chunks

  // Returns the parts of a large result that are there since the last call.
  std::vector<uint32_t> TakeNewParts();
  // Returns what a worker is told of a part; nothing if it gets none of it.
  std::optional<ipc::CollectedPart> PartFor(uint32_t rank, uint32_t part) const;
  // The result, when all chunks are done: by rank, the worker's message, and the arena it names.
  ipc::Collected ResultFor(uint32_t rank) const;
  const std::shared_ptr<ResultArena>& result() const { return result_; }
  // A worker has taken its result from the arena. Returns true when all that get any have.
  bool NoteTaken();

  // All chunks are done.
  void DropValues() { values_.reset(); }

 private:
  struct Chunk {
    uint32_t route = 0;
    uint32_t shard = 0;
    uint64_t begin = 0, end = 0;  // bytes of the route's values
  };
  const Route& RouteOf(uint32_t chunk) const { return plan_.routes[chunks_[chunk].route]; }
  uint64_t unit_bytes() const { return spec_.elems * SizeOf(spec_.dtype); }
  std::byte* result_bytes();
  size_t PlaceOf(uint32_t rank) const;
  // Calls use(segment, its first byte in the chunk, in the segment, number of bytes) for each
  // piece.
  void ForPieces(const Chunk& chunk, auto&& use) const;
  absl::StatusOr<Payload> Gather(const Chunk& chunk, const JobOutcome& outcome);
  // Folds what the workers give, each piece to place_of(segment, its first byte in the chunk, in
  // the segment).
  absl::Status FoldPieces(const Chunk& chunk, const JobOutcome& outcome, auto&& place_of);
  absl::StatusOr<Payload> FoldHere(const Chunk& chunk, const JobOutcome& outcome);
  void Put(const Chunk& chunk, const Payload& payload);
  // The chunk is in the result.
  void CountParts(const Chunk& chunk);

  ipc::Collect spec_;
  const std::string group_name_;
  const std::shared_ptr<const GroupPlaces> places_;
  const TimePoint since_;
  const CollectivePlan plan_;

  size_t given_ = 0;
  std::shared_ptr<NodeValues> values_;  // by place in here()
  const uint32_t first_rank_;
  std::vector<Chunk> chunks_;
  std::shared_ptr<ResultArena> result_;
  std::string inline_result_;

  mutable Mutex mutex_;
  std::vector<bool> came_ ABSL_GUARDED_BY(mutex_);  // by chunk
  PartsCount parts_ ABSL_GUARDED_BY(mutex_);
  uint32_t remaining_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace thalweg
