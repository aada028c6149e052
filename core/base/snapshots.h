// Snapshots are states of the weights that a job's shards keep, written to the shards' disks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace thalweg {

// A SnapshotId names a state of a job's weights, the same on all its shards.
struct SnapshotId {
  uint64_t branch = 0;  // grows when the job goes back, or gets other weights from a worker
  uint64_t step = 0;    // the updates that the job has done up to this state, as its workers count

  auto operator<=>(const SnapshotId&) const = default;
};

inline std::string ToString(const SnapshotId& id) {
  return absl::StrCat("the snapshot of step ", id.step, " of branch ", id.branch);
}

enum class SnapshotAction : uint8_t {
  kList = 1,     // only says which ones there are
  kTake = 2,     // begins to write the state as it is now; whoever changes it does not wait
  kRestore = 3,  // makes the state what it was; later snapshots are dropped
};

constexpr bool IsValid(SnapshotAction action) {
  return action >= SnapshotAction::kList && action <= SnapshotAction::kRestore;
}

// A SnapshotCall is what a node asks of a shard. One node of the job, the first, takes and restores
// for all, and only while no update can happen: it has the results of all rounds that it has
// contributed to, and contributes to none before all shards have answered.
struct SnapshotCall {
  SnapshotAction action = SnapshotAction::kList;
  SnapshotId id;  // to take or to restore
  // The latest that all shards of the job have, if there is one: it is kept, and the one before it.
  std::optional<SnapshotId> common = std::nullopt;

  bool operator==(const SnapshotCall&) const = default;
};

struct SnapshotReport {
  std::vector<SnapshotId> complete = {};  // on the disk of this shard, ascending
  bool is_writing = false;                // another one
  bool has_begun = false;                 // only for a worker: what it wants to be taken

  bool operator==(const SnapshotReport&) const = default;
};

// A shard lists at most this many.
inline constexpr size_t kMaxListedSnapshots = 64;

}  // namespace thalweg
