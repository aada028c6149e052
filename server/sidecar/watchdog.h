// A Watchdog finds what is late in a job on this node.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/bucket/bucket_table.h"
#include "server/sidecar/collective/collective_runner.h"
#include "server/sidecar/job/job_outcome.h"
#include "server/sidecar/job/progress.h"
#include "server/sidecar/letters/post_office.h"
#include "server/sidecar/workers/roster.h"

namespace thalweg {

// Thread-safe. It only looks at the other parts.
class Watchdog {
 public:
  // The watchdog watches these parts; all must outlive it.
  struct Context {
    const JobOutcome& outcome;
    const Roster& roster;
    const BucketTable& buckets;
    const CollectiveRunner& collectives;
    const PostOffice& post;
    const Progress& progress;
    ShardGroup& shards;
  };
  // The job began at `start`.
  Watchdog(Patience patience, TimePoint start, const Context& context);

  // Looks at everything as of `now`. Returns DeadlineExceeded, naming who is missing, when
  // something is late. Waits for nobody, so that a shard that does not answer cannot delay it.
  // Before `awake_since` this process did not run, so that it could hear nobody.
  absl::Status Look(TimePoint now, TimePoint awake_since) const;

  // Looks, often enough that its reason reaches workers before their own patience ends, until the
  // job does not go on. Errors go to `on_late`, and while workers wait for a result, `on_waiting`
  // is called kSignsOfLife times per timeout; both without a lock.
  void Watch(const std::function<void(const absl::Status&)>& on_late,
             const std::function<void()>& on_waiting) const;

 private:
  absl::Status CheckBucket(NodeBucket& bucket, TimePoint now, TimePoint awake_since) const;
  // Whoever shows no sign of life is late sooner than who does: returns an error when those that
  // `silent` names are late, or all that `awaited` names. The names come between `prefix` and
  // `what`.
  using Names = std::function<std::string()>;
  absl::Status Judge(Duration waited, const std::string& prefix, const Names& silent,
                     const Names& awaited, const char* what) const;
  bool WorkersWait() const;

  const Patience patience_;
  const TimePoint start_;
  const Context context_;
};

}  // namespace thalweg
