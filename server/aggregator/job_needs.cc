// This file holds the parts of Job that know how much memory it needs.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/aggregator/job.h"

namespace thalweg {

absl::Status Job::ReserveLocked() {
  // The nodes' windows also bound the results that are kept: on each stream as many as one window
  // holds, because the nodes share them.
  const uint64_t held = engine_.max_held() * plan_.flow().chunk_bytes;
  const uint64_t windows = held + held / spec_.num_nodes * most_streams_;
  const uint64_t layouts = layouts_.bytes();
  const uint64_t resumption =
      resumption_.bytes() + resumption_.num_missing() * plan_.MostBytesOfResult();
  // This shard may sum more than its equal part, which is all that can be told in advance.
  const uint64_t states =
      std::max(layouts_.state_bytes(), chunks_.bytes()) * (has_snapshots_ ? 2 : 1);
  const uint64_t letters = letters_.max_bytes();
  const absl::Status reserved = memory_.Reserve(windows + layouts + states + resumption + letters);
  if (reserved.ok()) return reserved;
  return absl::Status(
      reserved.code(),
      absl::StrCat("aggregator shard ", spec_.shard, ": the job ", reserved.message(), " (",
                   windows, " for ", spec_.num_nodes, " nodes with windows of ",
                   plan_.flow().window_chunks, " chunks of ", plan_.flow().chunk_bytes,
                   " bytes and results on ", most_streams_,
                   most_streams_ == 1 ? " stream, " : " streams, ", layouts, " for layouts, ",
                   states, " for residuals and weights",
                   has_snapshots_ ? " and copies of them for snapshots, " : ", ", resumption,
                   " for resuming, ", letters, " for letters, ", memory_.own_bytes(),
                   " for itself); raise the shard's limit (THALWEG_MEMORY_LIMIT) or the "
                   "tenant's quota, add aggregators, or lower THALWEG_WINDOW_CHUNKS or "
                   "THALWEG_CHUNK_BYTES"));
}

absl::Status Job::ReserveKeptLocked(uint32_t node, uint32_t chunk) {
  const ServedNode* sink = peers_[node].sink.get();
  if (sink == nullptr) return absl::OkStatus();
  const ServedNode::Kept kept = sink->KeptResults(chunk);
  // What a node contributes has a place in its windows, of which the results that it had not
  // received take the others.
  if (kept.results >= engine_.window_of(node)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        members_.Name(node), " has acknowledged none of the last ", kept.results,
        " results of a stream, expected to have received all but fewer than its windows of ",
        engine_.window_of(node), " chunks"));
  }
  if (kept.streams <= most_streams_) return absl::OkStatus();
  most_streams_ = kept.streams;
  return ReserveLocked();
}

void Job::UpdateMemoryLocked() {
  const bool is_over = !failure_.ok() || members_.IsEmpty();
  if (is_over) memory_.Release();
  memory_.Show({.bytes = is_over ? 0 : engine_.held_bytes() + quorum_.held_bytes(),
                .limit_bytes = is_over ? 0 : engine_.max_held() * plan_.flow().chunk_bytes,
                .state_bytes = chunks_.bytes()});
}

}  // namespace thalweg
