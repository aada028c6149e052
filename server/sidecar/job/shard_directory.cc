#include "server/sidecar/job/shard_directory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/base/printable.h"

namespace thalweg {
namespace {

// A pointer for a shard that outlives every job.
std::shared_ptr<Shard> Unowned(Shard* shard) { return {std::shared_ptr<void>(), shard}; }

}  // namespace

absl::StatusOr<ShardDirectory::JobShards> ShardDirectory::ShardsOf(const ipc::Hello& hello) {
  if (hello.shards.empty() && hello.num_nodes > 1 && options_.are_own) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the workers form ", hello.num_nodes, " nodes, but the sidecar of node ", hello.node,
        " knows no aggregator at which they could meet, and hosts no shard for this job: start it "
        "with --aggregators HOST:PORT, or leave THALWEG_LOCAL_SHARDS at auto and THALWEG_MIN_NODES "
        "out"));
  }
  JobShards job;
  THALWEG_ASSIGN_OR_RETURN(job.signer, SignerOf(hello.secret));
  if (options_.hosted.shard != nullptr) {
    job.invitation = options_.hosted.invite(hello.job, IdentityOf(job.signer.get()));
  }
  if (hello.shards.empty()) {
    for (Shard* const shard : options_.configured) {
      job.shards.push_back(Returning(Unowned(shard)));
    }
  }
  for (const ShardPlace& place : hello.shards) {
    THALWEG_ASSIGN_OR_RETURN(job.shards.emplace_back(), Find(place, hello.node));
  }
  return job;
}

absl::StatusOr<std::shared_ptr<Shard>> ShardDirectory::Find(const ShardPlace& place,
                                                            uint32_t node) {
  if (place.host == node) {
    if (options_.hosted.shard != nullptr) return Returning(Unowned(options_.hosted.shard));
    return absl::InvalidArgumentError(
        absl::StrCat("node ", node, " is to host a shard at ", place.address,
                     ", but its sidecar hosts none: start it with --shard-listen"));
  }
  if (options_.connect == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("this sidecar cannot connect to a shard at ", place.address));
  }
  THALWEG_RETURN_IF_ERROR(CheckName("address of a shard", place.address));
  MutexLock lock(mutex_);
  std::shared_ptr<Shard>& known = by_address_[place.address];
  if (known == nullptr) known = options_.connect(place.address);
  return Returning(known);
}

std::shared_ptr<Shard> ShardDirectory::Returning(std::shared_ptr<Shard> shard) const {
  if (options_.make_returning == nullptr) return shard;
  return options_.make_returning(std::move(shard));
}

absl::StatusOr<std::shared_ptr<const JobSigner>> ShardDirectory::SignerOf(
    const std::string& secret) const {
  if (secret.empty()) return nullptr;
  if (options_.make_signer != nullptr) return options_.make_signer(secret);
  return absl::InvalidArgumentError("this sidecar serves no jobs that have a secret");
}

absl::StatusOr<ShardDirectory::Offer> ShardDirectory::OfferTo(const ipc::HostShard& request) {
  Offer offer;
  offer.answer.aggregators = options_.addresses;
  if (options_.hosted.shard == nullptr) return offer;
  offer.answer.address = options_.hosted.address;
  THALWEG_ASSIGN_OR_RETURN(const auto signer, SignerOf(request.secret));
  offer.invitation = options_.hosted.invite(request.job, IdentityOf(signer.get()));
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
