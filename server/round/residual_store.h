// What a shard's encoding of results has left out so far and adds to the next ones: a residual for
// each chunk that it sums in int8 or onebit (docs/codecs.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/layout.h"
#include "core/base/mutex.h"
#include "core/base/wire_format.h"

namespace thalweg {

// Whether results in this format lose something.
constexpr bool HasResidual(WireFormat wire) {
  return wire == WireFormat::kInt8 || wire == WireFormat::kOneBit;
}

// One chunk's. Folds, reads and writes take turns; nodes that wait for a round's result before they
// go on to the next have nothing to wait for.
struct Residual {
  explicit Residual(uint64_t num_elems) : elems(num_elems) {}

  const uint64_t elems;
  Mutex mutex;
  // Empty until something was left out or written; the same as zeros.
  std::vector<float> values ABSL_GUARDED_BY(mutex);
};

// The residuals of one job. Thread-compatible.
class ResidualStore {
 public:
  // The residual of a chunk of `elems` elements, made at first use. Shared: a fold in progress
  // keeps its residual when the store drops it.
  std::shared_ptr<Residual> Get(BucketId bucket, uint32_t chunk, uint64_t elems);
  // Null when there is none yet.
  std::shared_ptr<Residual> Find(BucketId bucket, uint32_t chunk) const;

  // Forgets the residuals of earlier layouts of bucket `id.index`.
  void DropOlderLayouts(BucketId id);

  // That the residuals have when all are in use.
  uint64_t bytes() const { return bytes_; }

 private:
  std::map<std::pair<BucketId, uint32_t>, std::shared_ptr<Residual>> residuals_;
  uint64_t bytes_ = 0;
};

}  // namespace thalweg
