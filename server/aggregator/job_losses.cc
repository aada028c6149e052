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
  if (const absl::Status needed = resumption_.CheckMayLose(node); !needed.ok()) {
    return absl::Status(why.code(), absl::StrCat(needed.message(), ": ", why.message()));
  }
  const bool was_present = peers_[node].sink != nullptr;
  const Members::Change change = members_.SetLost(node, std::string(why.message()));
  spdlog::warn("job '{}': goes on without {}: {}", spec_.job, members_.Name(node), change.why);
  metrics_.lost_nodes.Add(1);
  if (was_present) metrics_.nodes.Add(-1);
  Loss loss{{}, nullptr, why};
  THALWEG_RETURN_IF_ERROR(AddToLossLocked(engine_.Remove(node, now), node, why, now, &loss));
  THALWEG_RETURN_IF_ERROR(AddToLossLocked(quorum_.Remove(node, now), node, why, now, &loss));
  UpdateMemoryLocked();
  loss.sink = std::exchange(peers_[node].sink, nullptr);  // a job that fails tells it with the rest
  return loss;
}

absl::Status Job::AddToLossLocked(RoundEngine::Removed removed, uint32_t node,
                                  const absl::Status& why, TimePoint now, Loss* loss) {
  if (!removed.impossible.empty()) {
    return absl::Status(why.code(), absl::StrCat(ToString(removed.impossible.front().id),
                                                 " cannot complete: ", why.message()));
  }
  for (CompleteRound& round : removed.completed) {
    if (round.id.round == 1) chunks_.DropOlderLayouts(round.id.bucket);  // as in HoldLocked
    const LayoutRegistry::Weight weight = layouts_.WeightOf(round.id.bucket, round.elems);
    Completed& completed = loss->completed.emplace_back(Completed{.round = std::move(round),
                                                                  .state = nullptr,
                                                                  .raw_bytes = weight.raw_bytes,
                                                                  .last_node = node,
                                                                  .at = now});
    THALWEG_RETURN_IF_ERROR(FindStateLocked(completed));
  }
  return absl::OkStatus();
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
