#include "core/exchange/served_shard.h"

#include <chrono>
#include <optional>
#include <utility>

#include "core/base/mutex.h"

namespace thalweg {
namespace {

// BeginJoin keeps the deadline itself, so that this time is never needed.
constexpr Duration kAnswerTime = std::chrono::seconds(10);

struct Answer {
  Mutex mutex;
  CondVar changed;
  std::optional<absl::StatusOr<std::unique_ptr<Member>>> value ABSL_GUARDED_BY(mutex);
};

// A node in the shard's own process takes its results at once.
class DirectNode : public ServedNode {
 public:
  explicit DirectNode(std::shared_ptr<MemberEvents> events) : events_(std::move(events)) {}

  void OnResult(RoundResult result) override { events_->OnResult(std::move(result)); }
  void OnFailed(absl::Status why) override { events_->OnFailed(std::move(why)); }

 private:
  const std::shared_ptr<MemberEvents> events_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Member>> ServedShard::Join(const JoinRequest& request,
                                                          std::shared_ptr<MemberEvents> events,
                                                          TimePoint deadline) {
  const auto answer = std::make_shared<Answer>();
  const GiveUp give_up =
      BeginJoin(request, std::make_shared<DirectNode>(std::move(events)), deadline,
                [answer](absl::StatusOr<std::unique_ptr<Member>> member) {
                  MutexLock lock(answer->mutex);
                  answer->value = std::move(member);
                  answer->changed.NotifyAll();
                });
  {
    MutexLock lock(answer->mutex);
    if (answer->changed.WaitUntil(answer->mutex, deadline + kAnswerTime,
                                  [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(answer->mutex) {
                                    return answer->value.has_value();
                                  })) {
      return *std::move(answer->value);
    }
  }
  const absl::Status late =
      absl::DeadlineExceededError("the shard has not answered a Join in time");
  give_up(late);
  return late;
}

}  // namespace thalweg
