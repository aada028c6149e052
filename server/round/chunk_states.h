// ChunkStates holds what a shard keeps of chunks between their rounds: the residuals of formats
// that lose something, and the weights that it updates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/layout.h"
#include "core/base/loss_scale.h"
#include "core/base/mutex.h"
#include "core/base/update.h"
#include "core/base/wire_format.h"

namespace thalweg {

// Versions say which weights of a chunk nodes have, where its rule lets nodes be apart. The first
// weights are version 0, and each update makes the next one.
struct Versions {
  // An Ask is of a node whose result in `round` is weights of version `least`, or a later one.
  struct Ask {
    uint32_t node = 0;
    uint64_t round = 0;
    uint64_t least = 0;
  };

  uint64_t latest = 0;
  std::map<uint32_t, uint64_t> seen;  // by node that updates alone: what it got last
  std::vector<Ask> asks;              // that wait
};

// A ChunkState belongs to one chunk. Folds, reads and writes take turns on its mutex; nodes that
// wait for a round's result before they contribute to the next never contend for it.
struct ChunkState {
  explicit ChunkState(uint64_t num_elems, std::vector<ElemRange> padded = {})
      : elems(num_elems), padding(std::move(padded)) {}

  const uint64_t elems;
  // These elements belong to no tensor: their residual is dropped, and no checkpoint has it.
  const std::vector<ElemRange> padding;
  Mutex mutex;
  // What the encoding of earlier results left out and the next encoding adds (docs/codecs.md).
  // Empty is the same as all zeros; values are allocated when something is left out or written.
  std::vector<float> residual ABSL_GUARDED_BY(mutex);
  // The loss scale in whose units the residual is.
  double loss_scale ABSL_GUARDED_BY(mutex) = kUnknownLossScale;
  Weights weights ABSL_GUARDED_BY(mutex);           // of a bucket with an UpdateRule
  std::vector<float> mean ABSL_GUARDED_BY(mutex);   // that waits for a pull; empty: none does
  bool is_measured ABSL_GUARDED_BY(mutex) = false;  // the moments have that of the next pull
  // What nodes have of weights that come as differences; empty: they have none.
  std::vector<float> sent ABSL_GUARDED_BY(mutex);
  Versions versions ABSL_GUARDED_BY(mutex);

  // Returns the weights, to be changed. Whoever changes them gets them here.
  Weights& WeightsToChange() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // A snapshot wants the weights as they are now: it gets them by FetchWanted, once, also if they
  // have been changed by then, which costs a copy. Call both in turns.
  void WantWeights() ABSL_LOCKS_EXCLUDED(mutex);
  Weights FetchWanted() ABSL_LOCKS_EXCLUDED(mutex);

 private:
  bool is_wanted_ ABSL_GUARDED_BY(mutex) = false;  // and has not been copied
  std::optional<Weights> copy_ ABSL_GUARDED_BY(mutex);
};

// ChunkStates holds the states of one job. It is thread-compatible.
class ChunkStates {
 public:
  // Returns the state of a chunk of `elems` elements with this padding, which takes
  // `bytes_per_elem` when all of it is in use; makes it at first use. The ownership is shared: a
  // fold in progress keeps its state alive when this drops it.
  std::shared_ptr<ChunkState> Get(BucketId bucket, uint32_t chunk, uint64_t elems,
                                  std::vector<ElemRange> padding = {},
                                  uint64_t bytes_per_elem = sizeof(float));
  // Returns the state, or null when it has not been made.
  std::shared_ptr<ChunkState> Find(BucketId bucket, uint32_t chunk) const;

  // A Chunk is one of them.
  struct Chunk {
    BucketId bucket;
    uint32_t number = 0;
    std::shared_ptr<ChunkState> state;
  };
  std::vector<Chunk> All() const;

  // Drops the states of earlier layouts of bucket `id.index`.
  void DropOlderLayouts(BucketId id);

  // Returns the bytes that the states take when all are in use.
  uint64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    std::shared_ptr<ChunkState> state;
    uint64_t bytes = 0;
  };

  std::map<std::pair<BucketId, uint32_t>, Entry> entries_;
  uint64_t bytes_ = 0;
};

}  // namespace thalweg
