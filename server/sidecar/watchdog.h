// Watches over a job on this node: what is late, and that the shards hear of the node.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "server/sidecar/bucket_table.h"
#include "server/sidecar/job_outcome.h"
#include "server/sidecar/progress.h"
#include "server/sidecar/roster.h"
#include "server/sidecar/shard_group.h"

namespace thalweg {

// Thread-safe, except Look, which one thread at a time may call. Only looks at the other parts.
class Watchdog {
 public:
  // The watchdog watches these parts; all must outlive it.
  struct Context {
    const JobOutcome& outcome;  // whoever changes it calls Wake
    const Roster& roster;
    const BucketTable& buckets;
    const Progress& progress;
    ShardGroup& shards;
  };
  // The job began at `start`.
  Watchdog(LayeredTimeout timeout, TimePoint start, const Context& context);

  // Looks at everything as of `now`, and sends a heartbeat when one is due. Returns
  // DeadlineExceeded, naming who is missing, when something is late, or why the shards do not know
  // the node any more. Takes as long as a heartbeat.
  absl::Status Look(TimePoint now);

  // Looks, often enough that its reason reaches workers before their own patience ends, until the
  // job does not go on. Errors go to `on_late`, which is called without a lock.
  void Watch(const std::function<void(const absl::Status&)>& on_late);
  void Wake();

 private:
  absl::Status CheckDeadlines(TimePoint now) const;
  absl::Status CheckBucket(NodeBucket& bucket, TimePoint now) const;

  const LayeredTimeout timeout_;
  const TimePoint start_;
  const Context context_;
  TimePoint next_heartbeat_;

  Mutex mutex_;
  CondVar changed_;
};

}  // namespace thalweg
