// This file holds the parts of Job that let it go on without a node.
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

namespace thalweg {

absl::StatusOr<std::optional<Job::Loss>> Job::LoseLocked(uint32_t node, const absl::Status& why,
                                                         TimePoint now) {
  if (!failure_.ok() || !members_.CanLose(node)) return std::nullopt;
  if (const absl::Status needed = rounds_.CheckMayLose(node); !needed.ok()) {
    return absl::Status(why.code(), absl::StrCat(needed.message(), ": ", why.message()));
  }
  const bool was_present = sinks_[node] != nullptr;
  const Members::Change change = members_.SetLost(node, std::string(why.message()));
  spdlog::warn("job '{}': goes on without {}: {}", spec_.job, members_.Name(node), change.why);
  metrics_.lost_nodes.Add(1);
  if (was_present) metrics_.nodes.Add(-1);
  Loss loss{{}, nullptr, why};
  THALWEG_ASSIGN_OR_RETURN(loss.completed, rounds_.Lose(node, why, now));
  THALWEG_RETURN_IF_ERROR(memory_.ReserveStates());
  UpdateMemoryLocked();
  loss.sink = std::exchange(sinks_[node], nullptr);  // a job that fails tells it with the rest
  return loss;
}

void Job::Conclude(const Loss& loss) {
  if (loss.sink != nullptr) {
    loss.sink->OnFailed(
        OfJob(spec_.job, absl::Status(loss.why.code(), absl::StrCat("the job goes on without this "
                                                                    "node: ",
                                                                    loss.why.message()))));
  }
  for (const Completed& completed : loss.completed) {
    if (const absl::Status status = delivery_.Deliver(completed); !status.ok()) return Fail(status);
  }
}

}  // namespace thalweg
