// Settings of a session that come from the environment alone: for how long others may be away.
#pragma once

#include "absl/status/statusor.h"
#include "core/base/clock.h"

namespace thalweg {

// Return THALWEG_RECONNECT and THALWEG_LOSS_GRACE. InvalidArgument: it is not a number of seconds
// from 0 to 3600.
absl::StatusOr<Duration> ReconnectFromEnv();
absl::StatusOr<Duration> LossGraceFromEnv();

}  // namespace thalweg
