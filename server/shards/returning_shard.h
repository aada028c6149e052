// ReturningShard is a shard that may be restarted, as one job's node calls it. The shard has then
// forgotten the job; its member joins it again and puts everything back, so that its caller notices
// nothing but a pause.
//
//   node's calls  ──▶ ReturningMember ──▶ the shard's Member of the moment
//                          ▲   ReturningSeat: which member that is
//   node's events ◀── Listener ┴─────────────◀ OnResult; OnFailed(NotFound): it has been restarted
//
//   shard-return thread    leaves the old membership → Join with resume → Register …
//                          → Supply what the shard wants → repeat contributions
#pragma once

#include <memory>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/exchange/shard.h"
#include "server/base/metrics.h"
#include "server/shards/returning_seat.h"

namespace thalweg {

// A ReturningShard is thread-safe. It and its members add to the contracts of Shard and Member:
// - When the shard has been restarted, calls wait until the node has joined again, or fail at their
//   deadline. Contribute does not wait.
// - The node tries to join again for `patience`, counted from when it learns that the shard has
//   forgotten it. Then OnFailed names the shard.
// - The shard's destructor may take that long when a member leaves while it tries. Leave does not.
class ReturningShard : public Shard {
 public:
  // `metrics` must outlive the object.
  ReturningShard(std::shared_ptr<Shard> shard, Duration patience, MetricRegistry& metrics);

  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t num_nodes, TimePoint deadline,
                                        const std::stop_token& stop) override {
    return shard_->MeasureLink(num_nodes, deadline, stop);
  }
  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request,
                                               std::shared_ptr<MemberEvents> events,
                                               TimePoint deadline) override;
  absl::StatusOr<std::unique_ptr<Member>> TakeUp(const JoinRequest& request, const KeptSeat& kept,
                                                 const std::shared_ptr<MemberEvents>& events,
                                                 TimePoint deadline) override;

 private:
  // Makes the member of a seat that has joined.
  std::unique_ptr<Member> Occupy(const std::shared_ptr<ReturningSeat>& seat);

  const std::shared_ptr<Shard> shard_;
  const Duration patience_;
  const ReturningSeat::Metrics metrics_;
  Mutex mutex_;
  std::vector<Thread> threads_ ABSL_GUARDED_BY(mutex_);  // one a member
};

}  // namespace thalweg
