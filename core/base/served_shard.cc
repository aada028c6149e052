#include "core/base/served_shard.h"

#include <chrono>
#include <memory>
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
  std::optional<absl::StatusOr<Membership>> value ABSL_GUARDED_BY(mutex);
};

}  // namespace

absl::StatusOr<Membership> ServedShard::Join(const JoinRequest& request, TimePoint deadline) {
  const auto answer = std::make_shared<Answer>();
  const SessionToken token =
      BeginJoin(request, deadline, [answer](absl::StatusOr<Membership> membership) {
        MutexLock lock(answer->mutex);
        answer->value = std::move(membership);
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
  Leave(token, late);
  return late;
}

}  // namespace thalweg
