// RecordingShard is a test double for this room: it records its calls, and tests wait for the
// records with a deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/base/mutex.h"
#include "core/exchange/served_shard.h"
#include "server/transport/testing/fake_member.h"
#include "server/transport/testing/recorder.h"

namespace thalweg {

// A RecordingShard gives every node a FakeMember, or join_answer's error.
class RecordingShard : public ServedShard, public FakeAnswers {
 public:
  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t, TimePoint, const std::stop_token&) override {
    return absl::UnimplementedError("a server is not asked");
  }
  GiveUp BeginJoin(const JoinRequest& request, std::shared_ptr<ServedNode> node, TimePoint deadline,
                   Joined joined) override {
    const uint32_t number = request.node;
    nodes.Add(node);
    const Answer answer = [this, number, node = std::weak_ptr(node),
                           joined = std::move(joined)](const absl::Status& refusal) {
      if (!refusal.ok()) return joined(refusal);
      if (const auto answer = join_answer.Get(); !answer.ok()) return joined(answer.status());
      joined(std::make_unique<FakeMember>(*this, number, node));
    };
    bool waits = false;
    {
      MutexLock lock(mutex_);
      waits = hold_joins;
      if (waits) waiting_[number] = answer;
    }
    joins.Add({request, deadline});
    if (!waits) answer(absl::OkStatus());
    return [this, number](const absl::Status& reason) { EndWait(number, reason); };
  }
  // Answers the Joins that hold_joins keeps waiting, and all further ones at once.
  void AnswerJoins() {
    std::map<uint32_t, Answer> waiting;
    {
      MutexLock lock(mutex_);
      hold_joins = false;
      waiting.swap(waiting_);
    }
    for (const auto& [number, answer] : waiting) answer(absl::OkStatus());
  }

  std::atomic<bool> hold_joins = false;  // AnswerJoins resets it

 private:
  using Answer = std::function<void(const absl::Status& refusal)>;

  void EndWait(uint32_t number, const absl::Status& reason) {
    Answer answer;
    {
      MutexLock lock(mutex_);
      if (auto waiting = waiting_.extract(number)) answer = std::move(waiting.mapped());
    }
    if (answer == nullptr) return;
    answer(reason);
    given_up.Add({number, reason});
  }

  Mutex mutex_;
  std::map<uint32_t, Answer> waiting_ ABSL_GUARDED_BY(mutex_);  // by node number
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
