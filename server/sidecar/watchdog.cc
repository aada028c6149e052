#include "server/sidecar/watchdog.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/base/awake_time.h"

namespace thalweg {
namespace {

// A shard that has answered none of so many heartbeats is silent.
constexpr int kHeartbeatsMissed = 3;
// A worker that nobody on this node waits for, but perhaps other nodes, may be silent for as long
// on a busy machine.
constexpr Duration kWorkerSilence = std::chrono::seconds(5);

Duration LookInterval(const LayeredTimeout& timeout) {
  return std::clamp<Duration>(timeout.worker / 50, std::chrono::milliseconds(2),
                              std::chrono::milliseconds(100));
}

absl::Status Late(const std::string& what, Duration tolerated, const char* variable) {
  return absl::DeadlineExceededError(
      absl::StrCat(what, " within ", ToSeconds(tolerated),
                   " s; if that is a long but healthy pause, raise the timeout (", variable, ")"));
}

}  // namespace

Watchdog::Watchdog(Patience patience, TimePoint start, const Context& context)
    : patience_(patience), start_(start), context_(context) {}

absl::Status Watchdog::Look(TimePoint now, TimePoint awake_since) const {
  const Duration tolerated = patience_.silence.sidecar();
  const absl::Status gathered = context_.roster.CheckGathered(now - start_, tolerated);
  if (!gathered.ok()) return Late(std::string(gathered.message()), tolerated, "THALWEG_TIMEOUT");
  const Duration silence = std::max(tolerated, kWorkerSilence);
  const std::string silent =
      now - awake_since > silence ? context_.roster.SilentNames(now - silence) : "";
  if (!silent.empty()) {
    return Late(absl::StrCat(silent, " showed no sign of life"), silence, "THALWEG_TIMEOUT");
  }
  for (const auto& bucket : context_.buckets.All()) {
    THALWEG_RETURN_IF_ERROR(CheckBucket(*bucket, now, awake_since));
  }
  THALWEG_RETURN_IF_ERROR(context_.collectives.CheckLate(now, awake_since));
  return context_.post.CheckLate(now, awake_since);
}

absl::Status Watchdog::CheckBucket(NodeBucket& bucket, TimePoint now, TimePoint awake_since) const {
  const BucketRound::Waiting waiting = bucket.round().waiting();
  const std::string id = absl::StrCat("bucket ", ToString(bucket.id()), " round ");
  const auto check_workers = [&](uint64_t round, Duration waited,
                                 const std::vector<uint32_t>& awaited, const char* what) {
    const Roster& roster = context_.roster;
    const std::string prefix = absl::StrCat(id, round, ": ");
    const auto silent = [&] {
      return roster.NamesOf(roster.SilentOnes(awaited, now - patience_.silence.sidecar()));
    };
    return Judge(waited, prefix, silent, [&] { return roster.NamesOf(awaited); }, what);
  };
  if (!waiting.missing.empty()) {
    THALWEG_RETURN_IF_ERROR(check_workers(waiting.round + 1,
                                          now - std::max(waiting.first_submit, awake_since),
                                          waiting.missing, " did not submit"));
  }
  if (!waiting.is_running) return absl::OkStatus();
  // Measured from the last progress, so that a slow network is not taken for a dead one.
  const Duration waited =
      now - std::max({context_.progress.last(), waiting.ready_since, awake_since});
  if (waited <= std::min(patience_.silence.sidecar(), patience_.step.sidecar())) {
    return absl::OkStatus();
  }
  const std::vector<uint32_t> unfilled = bucket.UnfilledBy();
  if (!unfilled.empty()) {
    return check_workers(waiting.round, waited, unfilled, " did not make all of the gradient");
  }
  const auto [missing_chunks, chunks] = bucket.Outstanding();
  const std::string prefix = absl::StrCat(id, waiting.round, ": ", missing_chunks, " of ", chunks,
                                          " chunks did not come back; missing are ");
  const TimePoint answered =
      now - std::max(patience_.silence.sidecar(),
                     kHeartbeatsMissed * context_.shards.heartbeat_interval());
  return Judge(
      waited, prefix, [&] { return context_.shards.SilentPendingShards(answered); },
      [&] { return context_.shards.PendingShards(); }, "");
}

absl::Status Watchdog::Judge(Duration waited, const std::string& prefix, const Names& silent,
                             const Names& awaited, const char* what) const {
  const Duration silence = patience_.silence.sidecar(), step = patience_.step.sidecar();
  if (waited > silence) {
    const std::string names = silent();
    if (!names.empty()) return Late(absl::StrCat(prefix, names, what), silence, "THALWEG_TIMEOUT");
  }
  if (waited <= step) return absl::OkStatus();
  return Late(absl::StrCat(prefix, awaited(), what), step, "THALWEG_STEP_TIMEOUT");
}

bool Watchdog::WorkersWait() const {
  if (context_.collectives.IsBusy() || context_.post.IsBusy()) return true;
  const auto buckets = context_.buckets.All();
  return std::any_of(buckets.begin(), buckets.end(), [](const auto& bucket) {
    const BucketRound::Waiting waiting = bucket->round().waiting();
    return waiting.is_running || !waiting.missing.empty();
  });
}

void Watchdog::Watch(const std::function<void(const absl::Status&)>& on_late,
                     const std::function<void()>& on_waiting) const {
  const Duration interval = LookInterval(patience_.silence);
  const Duration life = patience_.silence.worker / kSignsOfLife;
  TimePoint told = start_;
  AwakeTime awake(start_, std::max(life, kWorkerSilence));
  while (!context_.outcome.WaitForEnd(Now() + interval)) {
    const TimePoint now = Now();
    if (const absl::Status late = Look(now, awake.Look(now)); !late.ok()) on_late(late);
    if (now - told < life || !WorkersWait()) continue;
    told = now;
    on_waiting();
  }
}

}  // namespace thalweg
