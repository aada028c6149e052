// How long a session waits for a sidecar that is away.
#pragma once

#include "absl/status/statusor.h"
#include "core/base/clock.h"

namespace thalweg {

// Returns THALWEG_RECONNECT. InvalidArgument: it is not a number of seconds from 0 to 3600.
absl::StatusOr<Duration> ReconnectFromEnv();

}  // namespace thalweg
