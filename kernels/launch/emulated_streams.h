// This header adds streams to emulated launches: a test of code that uses kernels can make them run
// when a stream of its own reaches them, as on a GPU, and not at once.
#pragma once

#include <functional>

#include "kernels/launch/stream.h"

namespace thalweg {

// An EmulatedQueue queues work on a stream.
using EmulatedQueue = std::function<void(CudaStream, std::function<void()>)>;

// Makes every launch, fill and copy on the device go through `queue` from now on; with null they
// run at once. A launch that fails later ends the program, because no caller is left to get the
// error. Must not be called while something is queued.
void SetEmulatedQueue(EmulatedQueue queue);

// Returns 0 when `work` is queued, or else what `work` returns.
LaunchError RunOnStream(CudaStream stream, std::function<LaunchError()> work);

}  // namespace thalweg
