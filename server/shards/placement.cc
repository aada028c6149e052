#include "server/shards/placement.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/hash.h"

namespace thalweg {

Placement::Placement(std::vector<uint32_t> weights)
    : weights_(std::move(weights)), loads_(weights_.size()) {}

Placement::Placed Placement::Place(BucketId id, const ChunkPlan& plan, WireFormat wire) {
  const auto known = placed_.find(id.index);
  if (known != placed_.end()) {
    for (size_t k = 0; k < loads_.size(); ++k) loads_[k] -= known->second.second.loads[k];
  }
  Placed placed;
  placed.loads.resize(weights_.size());
  placed.shards.reserve(plan.Count());
  for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
    const uint64_t bytes = MaxEncodedBytes(wire, plan.Elems(chunk));
    uint32_t best = 0;
    for (uint32_t k = 1; k < weights_.size(); ++k) {
      // This compares (load + bytes) / weight without dividing, and a weight of 0 never wins.
      if ((loads_[k] + bytes) * weights_[best] < (loads_[best] + bytes) * weights_[k]) best = k;
    }
    loads_[best] += bytes;
    placed.loads[best] += bytes;
    placed.shards.push_back(best);
  }
  placed_.insert_or_assign(id.index, std::pair(id, placed));
  return placed;
}

const Placement::Placed* Placement::Find(BucketId id) const {
  const auto known = placed_.find(id.index);
  return known == placed_.end() || known->second.first != id ? nullptr : &known->second.second;
}

absl::Status Placement::Restore(BucketId id, Placed placed) {
  const auto is_shard = [this](uint32_t shard) { return shard < weights_.size(); };
  if (placed.loads.size() != weights_.size() ||
      !std::all_of(placed.shards.begin(), placed.shards.end(), is_shard) ||
      placed_.contains(id.index)) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id),
                                                   " cannot have been placed like that on ",
                                                   weights_.size(), " shards"));
  }
  for (size_t k = 0; k < loads_.size(); ++k) loads_[k] += placed.loads[k];
  placed_.emplace(id.index, std::pair(id, std::move(placed)));
  return absl::OkStatus();
}

uint64_t Placement::Fingerprint(std::span<const uint32_t> shard_of_chunk) {
  Fnv1a hash;
  for (uint32_t shard : shard_of_chunk) hash.Add(shard);
  return hash.hash();
}

}  // namespace thalweg
