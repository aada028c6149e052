// ReturningShard is a shard that may be restarted, as one job's node calls it. The shard has then
// forgotten the job; this class joins it again and puts everything back, so that its caller notices
// nothing but a pause.
//
//   node's calls ──▶ ReturningShard ──▶ the shard (a RemoteShard)
//                         ▲   RoundLedger: buckets, open contributions, last results
//   node's sink  ◀── Ear ─┴───────────◀ OnResult; OnFailed(NotFound): it has been restarted
//
//   shard-return thread    leaves the old membership → Join with resume → Attach → RegisterBucket …
//                          → Supply what the shard wants → repeat contributions
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/metrics.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "server/sidecar/round_ledger.h"

namespace thalweg {

// Thread-safe. It is for one membership: its caller joins once, and keeps the first token, whatever
// the shard says later. It adds to Shard's contract:
// - When the shard has been restarted, calls wait until the node has joined again, or fail at their
//   deadline. Contribute does not wait.
// - The node tries to join again for `patience`, counted from when it learns that the shard has
//   forgotten it. Then the sink's OnFailed names the shard.
// - The destructor may take that long when the node leaves while it tries. Leave does not.
class ReturningShard : public Shard {
 public:
  // `metrics` must outlive the object.
  ReturningShard(std::shared_ptr<Shard> shard, Duration patience, MetricRegistry& metrics);
  ~ReturningShard() override;

  absl::StatusOr<LinkSpeed> MeasureLink(TimePoint deadline) override {
    return shard_->MeasureLink(deadline);
  }
  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) override;
  absl::Status Attach(SessionToken token, const std::string& identity,
                      std::shared_ptr<NodeSink> sink) override;
  absl::Status RegisterBucket(SessionToken token, const BucketAnnouncement& bucket,
                              TimePoint deadline) override;
  absl::Status Contribute(SessionToken token, Contribution contribution) override;
  absl::Status Supply(SessionToken token, RoundResult result) override;
  absl::StatusOr<std::vector<float>> ReadResidual(SessionToken token, BucketId bucket,
                                                  uint32_t chunk, TimePoint deadline) override;
  absl::Status WriteResidual(SessionToken token, BucketId bucket, uint32_t chunk,
                             std::span<const float> values, TimePoint deadline) override;
  absl::StatusOr<ClockReading> Heartbeat(SessionToken token, TimePoint deadline) override;
  void Leave(SessionToken token, const absl::Status& reason) override;

 private:
  class Ear;
  // Ears share this with the object, because the shard may hold them longer.
  struct State {
    explicit State(Gauge& kept) : kept_bytes(kept) {}

    Gauge& kept_bytes;
    Mutex mutex;
    CondVar changed;
    RoundLedger ledger ABSL_GUARDED_BY(mutex);
    std::shared_ptr<NodeSink> sink ABSL_GUARDED_BY(mutex);  // null when calls must stop
    // Counts memberships: what an earlier one still says does not count.
    uint64_t incarnation ABSL_GUARDED_BY(mutex) = 0;
    SessionToken token ABSL_GUARDED_BY(mutex) = 0;  // the shard's; 0: there is none to leave
    bool is_up ABSL_GUARDED_BY(mutex) = false;      // the shard has everything
    absl::Status lost ABSL_GUARDED_BY(mutex);       // how this membership has ended
    absl::Status end ABSL_GUARDED_BY(mutex);        // why there will be no other one
  };
  struct Seat {
    SessionToken token = 0;
    uint64_t incarnation = 0;
  };

  // Waits until the shard has everything, in a later incarnation than `after`.
  absl::StatusOr<Seat> AwaitSeat(uint64_t after, TimePoint deadline);
  // Returns what `call` returns for the shard's token; repeats it when the shard was restarted.
  template <typename Call>
  auto CallAgain(TimePoint deadline, const Call& call) -> decltype(call(SessionToken{}));

  void ReturnLoop();
  // Tries to join until it succeeds, the node leaves, or patience is over.
  absl::Status Return();
  absl::Status TryToReturn(TimePoint deadline);
  // Gives the shard what it needs and lets contributions pass.
  absl::Status PutBack(const Seat& seat, const std::vector<BucketRounds>& wanted,
                       TimePoint deadline);
  void Fail(const absl::Status& why);

  const std::shared_ptr<Shard> shard_;
  const Duration patience_;
  Counter& returns_;
  const std::shared_ptr<State> state_;
  // These are set by Join, before the thread starts with Attach.
  JoinRequest request_;
  Membership agreed_;
  Thread thread_;  // declared last, because it uses everything above
};

}  // namespace thalweg
