// This header describes errors of kernel launches.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// Returns OK when `error` is 0, else Internal that names `what` was launched. As with every CUDA
// error, a kernel that fails while it runs shows in a later call on its GPU. Thread-safe.
absl::Status LaunchStatus(LaunchError error, absl::string_view what);

}  // namespace thalweg
