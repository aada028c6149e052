#include "server/round/residual_store.h"

#include <utility>

namespace thalweg {

std::shared_ptr<Residual> ResidualStore::Get(BucketId bucket, uint32_t chunk, uint64_t elems,
                                             std::vector<ElemRange> padding) {
  std::shared_ptr<Residual>& residual = residuals_[{bucket, chunk}];
  if (residual == nullptr) {
    residual = std::make_shared<Residual>(elems, std::move(padding));
    bytes_ += elems * sizeof(float);
  }
  return residual;
}

std::shared_ptr<Residual> ResidualStore::Find(BucketId bucket, uint32_t chunk) const {
  const auto found = residuals_.find({bucket, chunk});
  return found == residuals_.end() ? nullptr : found->second;
}

void ResidualStore::DropOlderLayouts(BucketId id) {
  auto it = residuals_.lower_bound({BucketId{id.index, 0, 0}, 0});
  while (it != residuals_.end() && it->first.first < BucketId{id.index, id.generation, 0}) {
    bytes_ -= it->second->elems * sizeof(float);
    it = residuals_.erase(it);
  }
}

}  // namespace thalweg
