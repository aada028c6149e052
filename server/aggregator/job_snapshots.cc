// This file holds the parts of Job that take snapshots of its weights, and restore them.
#include <spdlog/spdlog.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

namespace thalweg {
namespace {

// Returns the first lines in which two descriptions of a bucket differ.
std::string Difference(const std::string& expected, const std::string& got) {
  const std::vector<std::string> ours = absl::StrSplit(expected, '\n');
  const std::vector<std::string> theirs = absl::StrSplit(got, '\n');
  size_t line = 0;
  while (line < ours.size() && line < theirs.size() && ours[line] == theirs[line]) ++line;
  return absl::StrCat("expected ", line < ours.size() ? ours[line] : "no further tensor", ", got ",
                      line < theirs.size() ? theirs[line] : "no further tensor");
}

absl::Status OfOtherWeights(const SnapshotHeader& header, const std::string& what) {
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(header.id), " is of other weights: ", what));
}

// Returns why a snapshot is not of the weights of which the other header would be.
absl::Status CheckSameWeights(const SnapshotHeader& ours, const SnapshotHeader& header) {
  const auto other = [&](const std::string& what) { return OfOtherWeights(header, what); };
  if (header.shard != ours.shard || header.num_shards != ours.num_shards ||
      header.chunk_bytes != ours.chunk_bytes) {
    return other(absl::StrCat("expected shard ", ours.shard, " of ", ours.num_shards,
                              " with chunks of ", ours.chunk_bytes, " bytes, got shard ",
                              header.shard, " of ", header.num_shards, " with ",
                              header.chunk_bytes));
  }
  for (const auto& [id, description] : ours.buckets) {
    const auto known = header.buckets.find(id);
    if (known == header.buckets.end()) {
      return other(absl::StrCat("it has no bucket ", ToString(id)));
    }
    if (known->second != description) {
      return other(
          absl::StrCat("bucket ", ToString(id), ": ", Difference(description, known->second)));
    }
  }
  // Its chunks have the memory of this job's.
  for (const auto& [id, description] : header.buckets) {
    if (!ours.buckets.contains(id)) {
      return other(absl::StrCat("it also has bucket ", ToString(id)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Job::CheckSnapshots() const {
  if (spec_.identity.empty()) {
    return absl::FailedPreconditionError("a job without a secret can have no snapshots");
  }
  if (snapshots_ != nullptr) return absl::OkStatus();
  const uint32_t host = spec_.hosts.empty() ? kNoHost : spec_.hosts[spec_.shard];
  return absl::FailedPreconditionError(absl::StrCat(
      "aggregator shard ", spec_.shard,
      host == kNoHost ? " keeps no snapshots: start it with --state-dir (THALWEG_STATE_DIR)"
                      : absl::StrCat(" is in the sidecar of node ", host,
                                     ", which keeps no snapshots: let aggregators with --state-dir "
                                     "sum alone (THALWEG_AGGREGATORS, THALWEG_LOCAL_SHARDS=0)"),
      ", or make the optimizer without snapshot_every"));
}

absl::StatusOr<SnapshotReport> Job::Snapshots(uint32_t node, const SnapshotCall& call) {
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
  }
  absl::Status status = CheckSnapshots();
  if (status.ok() && call.action == SnapshotAction::kTake) status = TakeSnapshot(call);
  if (status.ok() && call.action == SnapshotAction::kRestore) status = RestoreSnapshot(call.id);
  if (!status.ok()) return OfJob(spec_.job, status);
  return snapshots_->Report(spec_.identity);
}

absl::Status Job::HaveSnapshotsLocked() {
  if (!failure_.ok()) return failure_;  // since the call began; weights and layouts are gone
  const absl::Status status = memory_.ReserveCopies();
  if (status.ok()) UpdateMemoryLocked();
  return status;
}

SnapshotHeader Job::HeaderLocked(const SnapshotId& id) const {
  SnapshotHeader header{.job = spec_.job,
                        .identity = spec_.identity,
                        .id = id,
                        .shard = spec_.shard,
                        .num_shards = spec_.num_shards};
  header.chunk_bytes = plan_.flow().chunk_bytes;
  header.shares = plan_.shares().shares;
  header.buckets = rounds_.layouts().DescribeUpdated();
  return header;
}

absl::Status Job::TakeSnapshot(const SnapshotCall& call) {
  SnapshotHeader header;
  // A call that is repeated returns only when the first one has marked the weights of this step.
  MutexLock taking(taking_);
  std::vector<ChunkStates::Chunk> chunks;
  {
    MutexLock lock(mutex_);
    if (spec_.resume) return rounds_.LostWeights();
    THALWEG_RETURN_IF_ERROR(HaveSnapshotsLocked());
    header = HeaderLocked(call.id);
    chunks = rounds_.states().All();
  }
  std::erase_if(chunks, [](const ChunkStates::Chunk& chunk) {
    ChunkState& state = *chunk.state;
    MutexLock lock(state.mutex);
    return state.weights.params.empty();
  });
  header.num_chunks = chunks.size();
  THALWEG_ASSIGN_OR_RETURN(const bool is_new, snapshots_->Begin(spec_.identity, call.id));
  if (!is_new) return absl::OkStatus();
  for (const ChunkStates::Chunk& chunk : chunks) chunk.state->WantWeights();
  snapshots_->Write(std::move(header), std::move(chunks), call.common);
  return absl::OkStatus();
}

absl::Status Job::RestoreSnapshot(const SnapshotId& id) {
  if (snapshots_->Report(spec_.identity).is_writing) {
    return absl::FailedPreconditionError("another snapshot of this job is still being written");
  }
  SnapshotFolder& folder = snapshots_->folder();
  const auto header = folder.ReadHeader(spec_.identity, id);
  // To a node, NotFound would mean that this shard has been restarted.
  if (absl::IsNotFound(header.status())) {
    return absl::FailedPreconditionError(header.status().message());
  }
  THALWEG_RETURN_IF_ERROR(header.status());
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;  // since the call began; the layouts are gone
    THALWEG_RETURN_IF_ERROR(CheckSameWeights(HeaderLocked(id), *header));
    THALWEG_RETURN_IF_ERROR(HaveSnapshotsLocked());
  }
  THALWEG_ASSIGN_OR_RETURN(Snapshot snapshot, folder.Read(spec_.identity, id));
  std::vector<std::shared_ptr<ChunkState>> places;
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    THALWEG_ASSIGN_OR_RETURN(places, PlacesLocked(snapshot));
  }
  for (size_t i = 0; i < places.size(); ++i) {
    ChunkState& state = *places[i];
    MutexLock lock(state.mutex);
    state.WeightsToChange() = std::move(snapshot.chunks[i].weights);
  }
  folder.DropLater(spec_.identity, id);
  spdlog::info("job '{}': its weights are those of {}, in {} chunks", spec_.job, ToString(id),
               places.size());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::shared_ptr<ChunkState>>> Job::PlacesLocked(
    const Snapshot& snapshot) {
  THALWEG_RETURN_IF_ERROR(CheckSameWeights(HeaderLocked(snapshot.header.id), snapshot.header));
  std::vector<std::shared_ptr<ChunkState>> places;
  for (const SnapshotChunk& chunk : snapshot.chunks) {
    THALWEG_ASSIGN_OR_RETURN(const auto size,
                             rounds_.layouts().SizeOfWeights(chunk.bucket, chunk.chunk));
    if (chunk.weights.params.size() != size.elems) {
      return OfOtherWeights(
          snapshot.header,
          absl::StrCat("chunk ", chunk.chunk, " of bucket ", ToString(chunk.bucket), ": expected ",
                       size.elems, " weights, got ", chunk.weights.params.size()));
    }
    THALWEG_ASSIGN_OR_RETURN(std::shared_ptr<ChunkState> state,
                             StateLocked(chunk.bucket, chunk.chunk, size.elems));
    places.push_back(std::move(state));
  }
  return places;
}

void Job::KeepTermsLocked() {
  const std::vector<SnapshotHeader> known = snapshots_->folder().List(spec_.identity);
  if (known.empty() || known.back().num_shards != spec_.num_shards) return;
  plan_.Keep(known.back().chunk_bytes, known.back().shares);
}

}  // namespace thalweg
