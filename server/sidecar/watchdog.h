// A Watchdog finds what is late in a job on this node.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/sidecar/bucket_table.h"
#include "server/sidecar/job_outcome.h"
#include "server/sidecar/progress.h"
#include "server/sidecar/roster.h"
#include "server/sidecar/shard_group.h"

namespace thalweg {

// Thread-safe. It only looks at the other parts.
class Watchdog {
 public:
  // The watchdog watches these parts; all must outlive it.
  struct Context {
    const JobOutcome& outcome;
    const Roster& roster;
    const BucketTable& buckets;
    const Progress& progress;
    ShardGroup& shards;
  };
  // The job began at `start`.
  Watchdog(LayeredTimeout timeout, TimePoint start, const Context& context);

  // Looks at everything as of `now`. Returns DeadlineExceeded, naming who is missing, when
  // something is late. Waits for nobody, so that a shard that does not answer cannot delay it.
  absl::Status Look(TimePoint now) const;

  // Looks, often enough that its reason reaches workers before their own patience ends, until the
  // job does not go on. Errors go to `on_late`, which is called without a lock.
  void Watch(const std::function<void(const absl::Status&)>& on_late) const;

 private:
  absl::Status CheckDeadlines(TimePoint now) const;
  absl::Status CheckBucket(NodeBucket& bucket, TimePoint now) const;

  const LayeredTimeout timeout_;
  const TimePoint start_;
  const Context context_;
};

}  // namespace thalweg
