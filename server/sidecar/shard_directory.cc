#include "server/sidecar/shard_directory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// A pointer for a shard that outlives every job.
std::shared_ptr<Shard> Unowned(Shard* shard) { return {std::shared_ptr<void>(), shard}; }

}  // namespace

absl::StatusOr<std::vector<std::shared_ptr<Shard>>> ShardDirectory::ShardsOf(
    const ipc::Hello& hello) {
  std::vector<std::shared_ptr<Shard>> shards;
  if (hello.shards.empty()) {
    for (Shard* const shard : options_.configured) shards.push_back(Unowned(shard));
  }
  for (const ShardPlace& place : hello.shards) {
    if (place.host == hello.node) {
      if (options_.hosted.shard == nullptr) {
        return absl::InvalidArgumentError(
            absl::StrCat("node ", hello.node, " is to host a shard at ", place.address,
                         ", but its sidecar hosts none: start it with --shard-listen"));
      }
      shards.push_back(Unowned(options_.hosted.shard));
      continue;
    }
    if (options_.connect == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("this sidecar cannot connect to a shard at ", place.address));
    }
    MutexLock lock(mutex_);
    std::shared_ptr<Shard>& known = by_address_[place.address];
    if (known == nullptr) known = options_.connect(place.address);
    shards.push_back(known);
  }
  return shards;
}

absl::StatusOr<ShardDirectory::Offer> ShardDirectory::OfferTo(const ipc::HostShard& request) {
  Offer offer;
  offer.answer.aggregators = options_.addresses;
  if (options_.hosted.shard == nullptr) return offer;
  offer.answer.address = options_.hosted.address;
  THALWEG_ASSIGN_OR_RETURN(offer.invitation, options_.hosted.invite(request.job, request.secret));
  return offer;
}

void ShardDirectory::Prune() {
  std::vector<std::shared_ptr<Shard>> unused;  // released without the lock, which ends before it
  MutexLock lock(mutex_);
  for (auto entry = by_address_.begin(); entry != by_address_.end();) {
    const auto next = std::next(entry);
    // Nobody else can take a reference without the lock.
    if (entry->second.use_count() == 1) {
      unused.push_back(std::move(entry->second));
      by_address_.erase(entry);
    }
    entry = next;
  }
}

}  // namespace thalweg
