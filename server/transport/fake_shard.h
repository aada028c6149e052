// FakeShard and its sink are test doubles for this room: they record their calls, and tests wait
// for the records with a deadline.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "core/base/served_shard.h"

namespace thalweg {

inline constexpr Duration kTestPatience = std::chrono::seconds(60);

// A Recorder collects values that any thread may add, and lets a test wait for them.
template <typename T>
class Recorder {
 public:
  void Add(T value) {
    MutexLock lock(mutex_);
    values_.push_back(std::move(value));
    changed_.NotifyAll();
  }
  // Waits for `count` values and returns them, or the values so far after the deadline.
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
  uint32_t Backlog() const override { return 0; }
  void OnFailed(absl::Status why) override { failures.Add(std::move(why)); }

  Recorder<RoundResult> results;
  Recorder<absl::Status> failures;
};

// A FakeShard answers each contribution at once with a result of the same bytes, through the sink
// of the contribution's token; node n gets token join_answer->token + n. Set the answers before
// use.
class FakeShard : public ServedShard {
 public:
  absl::StatusOr<LinkSpeed> MeasureLink(TimePoint) override {
    return absl::UnimplementedError("a server is not asked");
  }
  SessionToken BeginJoin(const JoinRequest& request, TimePoint deadline, Joined joined) override {
    absl::StatusOr<Membership> answer = join_answer;
    if (answer.ok()) answer->token += request.node;
    const SessionToken token = answer.ok() ? answer->token : 0;
    bool waits = false;
    {
      MutexLock lock(mutex_);
      if (answer.ok()) identities_[token] = request.identity;
      waits = hold_joins;
      if (waits) waiting_[token] = joined;
    }
    joins.Add({request, deadline});
    if (!waits) joined(answer);
    return token;
  }
  // Answers the Joins that hold_joins keeps waiting, and all further ones at once.
  void AnswerJoins() {
    std::map<SessionToken, Joined> answered;
    {
      MutexLock lock(mutex_);
      hold_joins = false;
      answered.swap(waiting_);
    }
    for (const auto& [token, joined] : answered) {
      Membership membership = *join_answer;
      membership.token = token;
      joined(membership);
    }
  }
  absl::Status Attach(SessionToken token, const std::string& identity,
                      std::shared_ptr<NodeSink> sink) override {
    if (token < join_answer->token) return absl::NotFoundError("no such membership");
    {
      MutexLock lock(mutex_);
      if (identity != identities_[token]) return absl::PermissionDeniedError("another identity");
      attached_[token] = sink;
    }
    sinks.Add(std::move(sink));
    return absl::OkStatus();
  }
  absl::Status RegisterBucket(SessionToken, const BucketAnnouncement& bucket, TimePoint) override {
    buckets.Add(bucket);
    if (on_register != nullptr) on_register();
    return register_answer;
  }
  absl::Status Contribute(SessionToken token, Contribution contribution) override {
    if (!contribute_answer.ok()) return contribute_answer;
    contributions.Add(contribution);
    std::shared_ptr<NodeSink> sink;
    {
      MutexLock lock(mutex_);
      sink = attached_[token];
    }
    if (sink->Backlog() >= window_chunks) {
      return absl::FailedPreconditionError("node has more chunks on the way than its window");
    }
    sink->OnResult({contribution.id, contribution.epoch, contribution.wire, contribution.elems, 8,
                    2, std::move(contribution.payload)});
    return absl::OkStatus();
  }
  absl::Status Supply(SessionToken, RoundResult result) override {
    supplied.Add(std::move(result));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<float>> ReadResidual(SessionToken token, BucketId bucket,
                                                  uint32_t chunk, TimePoint) override {
    residual_reads.Add({token, bucket, chunk, {}});
    return residual_answer;
  }
  absl::Status WriteResidual(SessionToken token, BucketId bucket, uint32_t chunk,
                             std::span<const float> values, TimePoint) override {
    residual_writes.Add({token, bucket, chunk, {values.begin(), values.end()}});
    return residual_answer.status();
  }
  absl::StatusOr<ClockReading> Heartbeat(SessionToken token, TimePoint) override {
    heartbeats.Add(token);
    return ClockReading{"a boot", -5};
  }
  void Leave(SessionToken token, const absl::Status& reason) override {
    Joined joined;
    {
      MutexLock lock(mutex_);
      if (auto waiting = waiting_.extract(token)) joined = std::move(waiting.mapped());
    }
    if (joined) joined(reason);
    leaves.Add({token, reason});
  }

  struct ResidualCall {
    SessionToken token;
    BucketId bucket;
    uint32_t chunk;
    std::vector<float> values;
  };

  absl::StatusOr<Membership> join_answer = Membership{0xfedcba9876543210u, 5, 1 << 18, 64, 3};
  absl::Status register_answer;
  absl::Status contribute_answer;
  absl::StatusOr<std::vector<float>> residual_answer = std::vector<float>();
  uint32_t window_chunks = 1024;
  std::function<void()> on_register;
  bool hold_joins = false;  // set before use; AnswerJoins resets it

  Recorder<std::pair<JoinRequest, TimePoint>> joins;
  Recorder<std::shared_ptr<NodeSink>> sinks;
  Recorder<BucketAnnouncement> buckets;
  Recorder<Contribution> contributions;
  Recorder<RoundResult> supplied;
  Recorder<ResidualCall> residual_reads, residual_writes;
  Recorder<SessionToken> heartbeats;
  Recorder<std::pair<SessionToken, absl::Status>> leaves;

 private:
  Mutex mutex_;
  std::map<SessionToken, std::shared_ptr<NodeSink>> attached_ ABSL_GUARDED_BY(mutex_);
  std::map<SessionToken, Joined> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<SessionToken, std::string> identities_ ABSL_GUARDED_BY(mutex_);  // of Join; else empty
};

inline JoinRequest OfNode(uint32_t node) {
  JoinRequest request;
  request.node = node;
  return request;
}

// Returns a result with this payload, which holds floats.
inline RoundResult ResultOf(uint32_t chunk, Payload payload) {
  const uint64_t elems = payload.SizeBytes() / 4;
  return {{{}, chunk, 1}, 5, WireFormat::kFloat32, elems, 1, 0, std::move(payload)};
}

inline std::string BytesOf(const Payload& payload) {
  std::string bytes;
  for (const auto& piece : payload.pieces) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return bytes;
}

}  // namespace thalweg
