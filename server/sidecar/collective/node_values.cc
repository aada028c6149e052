#include "server/sidecar/collective/node_values.h"

#include "core/base/clock.h"
#include "core/base/status_macros.h"
#include "core/ipc/message.h"

namespace thalweg {
namespace {

// A wait for a worker's copy looks at the job this often.
constexpr Duration kLookAtValues = std::chrono::milliseconds(100);

}  // namespace

NodeValues::~NodeValues() {
  for (const auto& values : values_) {
    if (values && !values->is_inline()) on_released_(values->local_rank());
  }
}

absl::Status GivenValues::Await(uint64_t bytes, const JobOutcome& outcome) const {
  if (arena_ == nullptr) return absl::OkStatus();
  const auto blocks =
      static_cast<uint32_t>((bytes + ipc::kReadyBlockBytes - 1) / ipc::kReadyBlockBytes);
  while (arena_->WaitReady(blocks, Now() + kLookAtValues) < blocks) {
    THALWEG_RETURN_IF_ERROR(outcome.Check());
  }
  return absl::OkStatus();
}

}  // namespace thalweg
