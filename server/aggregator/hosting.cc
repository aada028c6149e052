// This file holds what lets nodes join an Aggregator in a sidecar.
#include <memory>
#include <string>

#include "server/aggregator/aggregator.h"

namespace thalweg {

std::unique_ptr<Aggregator::Hosting> Aggregator::Host(const std::string& job,
                                                      const std::string& identity) {
  MutexLock lock(mutex_);
  return std::unique_ptr<Hosting>(new Hosting(*this, invited_.insert(JobId{job, identity})));
}

Aggregator::Hosting::~Hosting() {
  std::shared_ptr<Job> uninvited;
  {
    MutexLock lock(shard_.mutex_);
    const JobId id = *invitation_;
    shard_.invited_.erase(invitation_);
    const auto job = shard_.jobs_.find(id);
    if (job != shard_.jobs_.end() && !shard_.invited_.contains(id)) uninvited = job->second;
  }
  if (uninvited != nullptr) {
    uninvited->FailUnlessBegun(
        absl::AbortedError("the workers of a node that is to host a shard are gone"));
  }
}

}  // namespace thalweg
