// Doubles for this room's tests: a shard and a sink that record what they are told, and wait for it
// with a deadline.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/mutex.h"

namespace thalweg {

inline constexpr Duration kTestPatience = std::chrono::seconds(60);

// Values that may be added from any thread and are waited for.
template <typename T>
class Recorder {
 public:
  void Add(T value) {
    MutexLock lock(mutex_);
    values_.push_back(std::move(value));
    changed_.NotifyAll();
  }
  // The values once there are `count` of them, or what there is after the deadline.
  std::vector<T> WaitFor(size_t count) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Now() + kTestPatience, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return values_.size() >= count;
    });
    return values_;
  }
  std::vector<T> Get() { return WaitFor(0); }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<T> values_;
};

class RecordingSink : public NodeSink {
 public:
  void OnResult(RoundResult result) override { results.Add(std::move(result)); }
  void OnFailed(absl::Status why) override { failures.Add(std::move(why)); }

  Recorder<RoundResult> results;
  Recorder<absl::Status> failures;
};

// Answers each contribution at once with a result of the same bytes, to the sink attached last. Set
// the answers before use.
class FakeShard : public Shard {
 public:
  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) override {
    joins.Add({request, deadline});
    if (on_join != nullptr) on_join();
    return join_answer;
  }
  absl::Status Attach(SessionToken token, std::shared_ptr<NodeSink> sink) override {
    if (token != join_answer->token) return absl::NotFoundError("no such membership");
    sinks.Add(std::move(sink));
    return absl::OkStatus();
  }
  absl::Status RegisterBucket(SessionToken token, BucketId id, const BucketLayout& layout,
                              TimePoint) override {
    buckets.Add({id, layout});
    return register_answer;
  }
  absl::Status Contribute(SessionToken token, Contribution contribution) override {
    if (!contribute_answer.ok()) return contribute_answer;
    contributions.Add(contribution);
    sinks.Get().back()->OnResult({contribution.id, contribution.epoch, contribution.wire,
                                  contribution.elems, 8, 2, std::move(contribution.payload)});
    return absl::OkStatus();
  }
  absl::Status Heartbeat(SessionToken token, TimePoint) override {
    heartbeats.Add(token);
    return absl::OkStatus();
  }
  void Leave(SessionToken token, const absl::Status& reason) override {
    leaves.Add({token, reason});
  }

  absl::StatusOr<Membership> join_answer = Membership{0xfedcba9876543210u, 5, 64};
  absl::Status register_answer;
  absl::Status contribute_answer;
  std::function<void()> on_join;

  Recorder<std::pair<JoinRequest, TimePoint>> joins;
  Recorder<std::shared_ptr<NodeSink>> sinks;
  Recorder<std::pair<BucketId, BucketLayout>> buckets;
  Recorder<Contribution> contributions;
  Recorder<SessionToken> heartbeats;
  Recorder<std::pair<SessionToken, absl::Status>> leaves;
};

inline std::string BytesOf(const Payload& payload) {
  std::string bytes;
  for (const auto& piece : payload.pieces) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return bytes;
}

}  // namespace thalweg
