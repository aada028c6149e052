// Messages about weights that shards keep. message.h says how they are written.
#pragma once

#include <cstdint>

#include "core/base/layout.h"
#include "core/base/snapshots.h"
#include "core/base/update.h"

namespace thalweg::ipc {

// SetSettings is a worker's announcement of settings that its later rounds name; all workers
// announce the same.
struct SetSettings {
  uint64_t number = 0;  // from 1
  UpdateStep step;
  bool operator==(const SetSettings&) const = default;
};

// GetWeights is a worker's request for a slice (core/base/update.h) of what the shards keep of a
// bucket, between two rounds. Weights answer it.
struct GetWeights {
  BucketId id;
  uint32_t slice = 0;
  bool operator==(const GetWeights&) const = default;
};

// Weights are such a slice, whole; a worker sends it to replace what the shards keep, and
// WeightsTaken answers it. The descriptor is an arena that holds the values in fp32; with 0 bytes
// there are none: parameters that nobody has written, or a moment that is zeros.
struct Weights {
  BucketId id;
  uint32_t slice = 0;
  uint64_t steps = 0;  // that the optimizer has done
  uint64_t bytes = 0;
  bool operator==(const Weights&) const = default;
};

// WeightsTaken is the sidecar's answer that the shards have them.
struct WeightsTaken {
  BucketId id;
  uint32_t slice = 0;
  bool operator==(const WeightsTaken&) const = default;
};

// GetSnapshots asks the shards to take or to restore a snapshot of what they keep, or only which
// ones all of them have; see core/base/snapshots.h. The first worker of the job sends it, while
// no update can happen.
struct GetSnapshots {
  SnapshotAction action = SnapshotAction::kList;
  SnapshotId id;  // of the snapshot; zeros for none
  bool operator==(const GetSnapshots&) const = default;
};

// Snapshots answer it with what all shards have by now. If one of them was still writing, none has
// begun to take another.
struct Snapshots {
  SnapshotReport report;
  bool operator==(const Snapshots&) const = default;
};

}  // namespace thalweg::ipc
