// What went wrong when kernels were launched, in words.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/stream.h"

namespace thalweg {

// OK when `error` is 0; else Internal, naming `what` was launched. A kernel that fails while it
// runs shows in a later call on its GPU, as every CUDA error does. Thread-safe.
absl::Status LaunchStatus(LaunchError error, absl::string_view what);

}  // namespace thalweg
