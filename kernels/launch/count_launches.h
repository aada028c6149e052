// This header counts the launches of some work, on a GPU or on the emulator.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// Returns how many kernels, fills and copies `work` launches in the stream that it is given. On a
// GPU they are recorded and do not run; on the emulator they run. Only one thread may call it.
absl::StatusOr<uint64_t> CountLaunches(const std::function<absl::Status(CudaStream)>& work);

}  // namespace thalweg
