#include "client/torch/all_reducer.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/torch/tensor.h"

namespace thalweg {

BucketId AllReducer::Announce(uint32_t bucket, const BucketLayout& layout) {
  const auto known = announced_.find(bucket);
  BucketId id{.index = bucket, .generation = 0};
  if (known != announced_.end()) {
    if (known->second.layout == layout) return known->second.id;
    id.generation = known->second.id.generation + 1;
  }
  const absl::Status status = session_->RegisterBucket(id, layout);
  if (!status.ok()) Throw(std::string(status.message()));
  announced_[bucket] = {id, layout};
  return id;
}

at::Tensor AllReducer::Mean(const at::Tensor& tensor, uint32_t bucket) {
  const std::string name = absl::StrCat("tensor of bucket ", bucket);
  const DType dtype = CheckReducible(tensor, name, c10::kCPU);
  const BucketId id =
      Announce(bucket, {.dtype = dtype, .tensors = {{"tensor", tensor.sizes().vec()}}});
  absl::StatusOr<ReducedBucket> reduced = session_->Reduce(id, BytesOf(tensor));
  if (!reduced.ok()) Throw(std::string(reduced.status().message()));
  return Wrap(*std::move(reduced), tensor.scalar_type()).view(tensor.sizes());
}

}  // namespace thalweg
