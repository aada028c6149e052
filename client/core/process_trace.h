// ProcessTrace is the trace of a training process; all its sessions share it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "core/base/trace.h"

namespace thalweg {

// Returns the trace that THALWEG_TRACE names; null when it is empty. Simultaneous sessions share
// one trace, which is closed with the last of them. A forked child has its own. Thread-safe.
absl::StatusOr<std::shared_ptr<TraceWriter>> ProcessTrace();

}  // namespace thalweg
