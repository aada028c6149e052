#include "server/sidecar/bucket/arena_gradient.h"

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// A thread waits this long for a worker's chunks before it checks whether the job still goes on.
constexpr Duration kLookAtInput = std::chrono::milliseconds(50);

}  // namespace

absl::Status ArenaGradient::WaitFor(uint64_t end) {
  const uint32_t chunks = bucket_.whole().part().plan.ChunkOf(end - 1) + 1;
  const TimePoint start = Now();
  for (uint32_t worker = 0; worker < terms_.local_size; ++worker) {
    while (bucket_.memory().WaitInput(worker, chunks, Now() + kLookAtInput) < chunks) {
      THALWEG_RETURN_IF_ERROR(terms_.outcome.Check());
      THALWEG_RETURN_IF_ERROR(bucket_.memory().Check());
      if (Now() - start > terms_.timeout) {
        return absl::DeadlineExceededError(absl::StrCat(
            terms_.rank_name(worker), " stopped filling bucket ", ToString(bucket_.id()), " round ",
            bucket_.round().number(), " at chunk ", chunks - 1));
      }
    }
  }
  const TimePoint now = Now();
  if (const JobTrace& trace = terms_.report.trace()) {
    trace.Work("wait_copy", start, now, terms_.report.Describe(bucket_));
  }
  bucket_.round().AddWaitTime(now - start);
  waited_ += (now - start).count();
  return absl::OkStatus();
}

}  // namespace thalweg
