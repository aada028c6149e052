// For tests: a shard that admits everybody with a window of two chunks, and notes what it hears.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/protocol.h"
#include "core/exchange/shard.h"
#include "core/exchange/shares.h"
#include "server/shards/testing/unasked_member.h"

namespace thalweg {

// Contribute, WaitForChunks, chunks and loss_scales are thread-safe.
class FakeShard : public Shard {
 public:
  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request,
                                               std::shared_ptr<MemberEvents> events,
                                               TimePoint) override {
    return Admit(
        request, std::move(events),
        {1, kMinChunkBytes, 2, weight, agreed_link, agreed_costs, agreed_shares, agreed_forecast});
  }
  absl::StatusOr<std::unique_ptr<Member>> TakeUp(const JoinRequest& request, const KeptSeat& kept,
                                                 const std::shared_ptr<MemberEvents>& events,
                                                 TimePoint) override {
    taken_up = kept;
    return Admit(request, events, kept.agreed);
  }
  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t, TimePoint, const std::stop_token&) override {
    ++num_measurements;
    return link;
  }

  // Waits until there were `count` contributions; false at `deadline`.
  bool WaitForChunks(size_t count, TimePoint deadline) {
    MutexLock lock(mutex_);
    return changed_.WaitUntil(mutex_, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return chunks_.size() >= count;
    });
  }
  std::vector<RoundId> chunks() {
    MutexLock lock(mutex_);
    return chunks_;
  }
  std::vector<double> loss_scales() {
    MutexLock lock(mutex_);
    return loss_scales_;
  }

  // Called with no lock held; null: nothing.
  std::function<void(const Contribution&)> on_contribute;
  absl::Status refusal, heartbeat;
  std::vector<LostNode> lost;  // named in answers to heartbeats
  JoinRequest joined;
  KeptSeat taken_up;
  LinkSpeed link, agreed_link;
  uint32_t weight = 1;
  std::vector<CodecCost> agreed_costs;
  std::vector<uint32_t> agreed_shares;
  ShareForecast agreed_forecast;
  std::vector<uint64_t> placements;
  std::vector<Group> groups;
  std::vector<SnapshotCall> snapshot_calls;
  SnapshotReport snapshots;                               // the answer
  std::function<void(const SnapshotCall&)> on_snapshots;  // before it; null: nothing
  std::shared_ptr<MemberEvents> sink;
  std::vector<absl::Status> left;
  int num_heartbeats = 0;
  int num_measurements = 0;

 private:
  class FakeMember : public UnaskedMember {
   public:
    FakeMember(FakeShard& shard, Terms terms) : shard_(shard), terms_(std::move(terms)) {}
    ~FakeMember() override { Leave(absl::OkStatus()); }

    const Terms& terms() const override { return terms_; }
    absl::Status Register(const BucketAnnouncement& bucket, TimePoint) override {
      shard_.placements.push_back(bucket.placement);
      return absl::OkStatus();
    }
    absl::Status MakeGroup(const Group& group, TimePoint) override {
      shard_.groups.push_back(group);
      return absl::OkStatus();
    }
    absl::Status Contribute(Contribution contribution) override {
      return shard_.Note(contribution);
    }
    absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call, TimePoint) override {
      shard_.snapshot_calls.push_back(call);
      if (shard_.on_snapshots) shard_.on_snapshots(call);
      return shard_.snapshots;
    }
    absl::StatusOr<Pulse> Heartbeat(TimePoint) override {
      ++shard_.num_heartbeats;
      if (!shard_.heartbeat.ok()) return shard_.heartbeat;
      return Pulse{{"a boot", 7}, shard_.lost};
    }
    void Leave(const absl::Status& reason) override {
      if (!std::exchange(has_left_, true)) shard_.left.push_back(reason);
    }

   private:
    FakeShard& shard_;
    const Terms terms_;
    bool has_left_ = false;
  };

  absl::StatusOr<std::unique_ptr<Member>> Admit(const JoinRequest& request,
                                                std::shared_ptr<MemberEvents> events, Terms terms) {
    joined = request;
    if (!refusal.ok()) return refusal;
    sink = std::move(events);
    return std::make_unique<FakeMember>(*this, std::move(terms));
  }
  absl::Status Note(const Contribution& contribution) {
    {
      MutexLock lock(mutex_);
      chunks_.push_back(contribution.id);
      loss_scales_.push_back(contribution.loss_scale);
      changed_.NotifyAll();
    }
    if (on_contribute) on_contribute(contribution);
    return absl::OkStatus();
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<RoundId> chunks_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> loss_scales_ ABSL_GUARDED_BY(mutex_);
};

class NullSink : public MemberEvents {
  void OnResult(RoundResult) override {}
  void OnFailed(absl::Status) override {}
};

}  // namespace thalweg
