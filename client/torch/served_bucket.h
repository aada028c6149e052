// ServedBucket is parameters whose weights shards keep: it pushes their gradients through a Session
// and gets their new values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/core/session.h"

namespace thalweg {

// Its methods throw std::runtime_error, whose text begins with "thalweg: ", and do not need
// Python's lock. It is thread-compatible.
class ServedBucket {
 public:
  using Parameters = std::vector<std::pair<std::string, at::Tensor>>;  // with their names

  // Announces the bucket, which has that number in the session. The parameters are dense, on the
  // CPU, and of one element type: fp32, fp16 or bf16.
  ServedBucket(std::shared_ptr<Session> session, uint32_t number, const Parameters& parameters,
               const UpdateRule& update);

  using Future = c10::intrusive_ptr<c10::ivalue::Future>;
  // Takes the parameters' gradients, one after the other in one tensor, which may be reused at
  // once. The future has the new weights in the same order and type: in read-only memory that the
  // node's workers share, until the next push. With an update that commits, `settings` are 0, and
  // it has the squares of the mean by granule of 4096 elements of a tensor, in float64, followed by
  // how many elements of it are not finite.
  // `waited_seconds`: for which this worker has waited for the weights of the push before.
  Future Push(const at::Tensor& gradients, uint64_t settings, double waited_seconds);
  // With such an update, the future has the new weights.
  Future Pull(uint64_t settings);
  // With LAMB, before that: the future has the squares of the weights by granule, those of the
  // update, and one number more.
  Future Measure(uint64_t settings);

  // Read and replace a slice: see Session. The values are fp32, all parameters' one after the
  // other; none where they are zeros or have never been written. A read also returns the steps
  // done.
  std::pair<std::optional<at::Tensor>, uint64_t> Read(uint32_t slice) const;
  void Write(uint32_t slice, const std::optional<at::Tensor>& values, uint64_t steps);

 private:
  const std::shared_ptr<Session> session_;
  const BucketId id_;
  const at::ScalarType type_;
  const bool commits_;
};

// Returns the sum of squares by granule (float64), in the order in which FusedTensors adds them up.
double TotalOfSquares(const at::Tensor& squares);

// Names the settings of one group as torch does: "lr", "weight_decay", "momentum", "dampening",
// "beta1", "beta2", "eps"; those that are not there are 0, and "trust_ratio" 1. Throws for any
// other name.
GroupStep GroupStepOf(const std::map<std::string, double>& settings);

// These ask the shards about snapshots of the weights (core/base/snapshots.h). The first returns
// whether a shard is writing, and the branch and step of each snapshot that all have; the second
// whether they have begun one. Throw.
using Snapshots = std::vector<std::pair<uint64_t, uint64_t>>;
std::pair<bool, Snapshots> ListSnapshots(Session& session);
bool TakeSnapshot(Session& session, uint64_t branch, uint64_t step);
void RestoreSnapshot(Session& session, uint64_t branch, uint64_t step);

}  // namespace thalweg
