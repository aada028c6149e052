// The trace of a training process, whatever the number of its sessions.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "core/base/trace.h"

namespace thalweg {

// As THALWEG_TRACE says; null when it is empty. Sessions that are there together share one, which
// is closed with the last of them. A forked child has its own. Thread-safe.
absl::StatusOr<std::shared_ptr<TraceWriter>> ProcessTrace();

}  // namespace thalweg
