// ResidualStore holds a shard's residuals: for each chunk of a format that HasResidual, what the
// encoding of earlier results left out and the next encoding adds (docs/codecs.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/layout.h"
#include "core/base/loss_scale.h"
#include "core/base/mutex.h"
#include "core/base/wire_format.h"

namespace thalweg {

// A Residual belongs to one chunk. Folds, reads and writes take turns on its mutex; nodes that wait
// for a round's result before they contribute to the next never contend for it.
struct Residual {
  explicit Residual(uint64_t num_elems, std::vector<ElemRange> padded = {})
      : elems(num_elems), padding(std::move(padded)) {}

  const uint64_t elems;
  // These elements belong to no tensor: their residual is dropped, and no checkpoint has it.
  const std::vector<ElemRange> padding;
  Mutex mutex;
  // Empty is the same as all zeros; values are allocated when something is left out or written.
  std::vector<float> values ABSL_GUARDED_BY(mutex);
  // The loss scale in whose units the values are.
  double loss_scale ABSL_GUARDED_BY(mutex) = kUnknownLossScale;
};

// A ResidualStore holds the residuals of one job. It is thread-compatible.
class ResidualStore {
 public:
  // Returns the residual of a chunk of `elems` elements with this padding; makes it at first use.
  // The ownership is shared: a fold in progress keeps its residual alive when the store drops it.
  std::shared_ptr<Residual> Get(BucketId bucket, uint32_t chunk, uint64_t elems,
                                std::vector<ElemRange> padding = {});
  // Returns the residual, or null when it has not been made.
  std::shared_ptr<Residual> Find(BucketId bucket, uint32_t chunk) const;

  // Drops the residuals of earlier layouts of bucket `id.index`.
  void DropOlderLayouts(BucketId id);

  // Returns the bytes that the residuals take when all are in use.
  uint64_t bytes() const { return bytes_; }

 private:
  std::map<std::pair<BucketId, uint32_t>, std::shared_ptr<Residual>> residuals_;
  uint64_t bytes_ = 0;
};

}  // namespace thalweg
