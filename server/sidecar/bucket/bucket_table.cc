#include "server/sidecar/bucket/bucket_table.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

absl::Status CheckSameUpdate(const NodeBucket& known, const ipc::RegisterBucket& message,
                             const std::string& owner) {
  if (known.update() == message.update) return absl::OkStatus();
  const auto text = [](const std::optional<UpdateRule>& update) {
    return update ? ToString(*update) : "none";
  };
  return absl::InvalidArgumentError(
      absl::StrCat("bucket ", ToString(message.id), ": ", known.owner(), " announced the update ",
                   text(known.update()), ", ", owner, " ", text(message.update),
                   ": all workers must give the same optimizer, options and groups of parameters"));
}

}  // namespace

void BucketTable::Open(const BucketTerms& terms) {
  MutexLock lock(announcing_);
  terms_ = terms;
}

absl::StatusOr<std::shared_ptr<NodeBucket>> BucketTable::Announce(
    uint32_t local_rank, const std::string& owner, const ipc::RegisterBucket& message,
    UniqueFd input) {
  MutexLock lock(announcing_);
  if (!terms_) {
    return absl::FailedPreconditionError(
        absl::StrCat(owner, " announced bucket ", ToString(message.id), " before it was welcomed"));
  }
  const std::shared_ptr<NodeBucket> earlier = Find(message.id.index);
  std::shared_ptr<NodeBucket> bucket = earlier;
  if (earlier != nullptr && earlier->id() == message.id) {
    THALWEG_RETURN_IF_ERROR(
        CheckSameLayout(message.id, earlier->layout(), earlier->owner(), message.layout, owner));
    THALWEG_RETURN_IF_ERROR(CheckSameUpdate(*earlier, message, owner));
  } else {
    THALWEG_ASSIGN_OR_RETURN(bucket, MakeBucket(earlier, owner, message));
    MutexLock table_lock(mutex_);
    buckets_[message.id.index] = bucket;
    if (earlier != nullptr) replaced_[message.id.index].push_back(earlier);
  }
  THALWEG_RETURN_IF_ERROR(bucket->AddInput(local_rank, std::move(input), message.memory));
  // The worker frees its earlier share as soon as it is answered.
  for (const std::shared_ptr<NodeBucket>& old : Replaced(message.id.index)) {
    old->memory().DropInput(local_rank);
  }
  return bucket;
}

absl::StatusOr<std::shared_ptr<NodeBucket>> BucketTable::MakeBucket(
    const std::shared_ptr<NodeBucket>& earlier, const std::string& owner,
    const ipc::RegisterBucket& message) {
  if (earlier != nullptr && message.id < earlier->id()) {
    return absl::FailedPreconditionError(
        absl::StrCat(owner, " announced bucket ", ToString(message.id), ", but ", earlier->owner(),
                     " has replaced that layout"));
  }
  if (earlier != nullptr && earlier->round().in_flight()) {
    return absl::FailedPreconditionError(
        absl::StrCat(owner, " announced bucket ", ToString(message.id),
                     " while a round of its earlier layout is in flight"));
  }
  if (earlier != nullptr && (message.update || earlier->update())) {
    return absl::InvalidArgumentError(
        absl::StrCat(owner, " announced another layout of bucket ", ToString(message.id),
                     ", whose weights are on the shards: there they keep their first one"));
  }
  THALWEG_ASSIGN_OR_RETURN(std::shared_ptr<NodeBucket> made,
                           states_.MakeBucket(All(), message, owner, *terms_,
                                              compression_.Choose(message.id, message.layout)));
  if (message.update) {
    Part& part = made->updated_part();
    THALWEG_ASSIGN_OR_RETURN(
        Placement::Placed placed,
        shards_.RegisterBucket(part.bucket, part.plan, Now() + terms_->patience));
    part.shard_of_chunk = std::move(placed.shards);
  }
  return made;
}

std::shared_ptr<NodeBucket> BucketTable::Find(uint32_t index) const {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(index);
  return found == buckets_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<NodeBucket>> BucketTable::Replaced(uint32_t index) const {
  MutexLock lock(mutex_);
  const auto found = replaced_.find(index);
  return found == replaced_.end() ? std::vector<std::shared_ptr<NodeBucket>>() : found->second;
}

std::vector<std::shared_ptr<NodeBucket>> BucketTable::TakeReplaced(uint32_t index) {
  MutexLock lock(mutex_);
  auto node = replaced_.extract(index);
  return node.empty() ? std::vector<std::shared_ptr<NodeBucket>>() : std::move(node.mapped());
}

std::vector<std::shared_ptr<NodeBucket>> BucketTable::All() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<NodeBucket>> all;
  all.reserve(buckets_.size());
  for (const auto& [index, bucket] : buckets_) all.push_back(bucket);
  return all;
}

size_t BucketTable::QuarterOf(uint32_t index) const {
  MutexLock lock(mutex_);
  const auto before = std::distance(buckets_.upper_bound(index), buckets_.end());
  return 1 + static_cast<size_t>(before) * 4 / buckets_.size();
}

}  // namespace thalweg
