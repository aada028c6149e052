// Streams for emulated launches: a test of what uses kernels can have them run when a stream of its
// own gets there, as on a GPU, and not at once.
#pragma once

#include <functional>

#include "kernels/cuda/stream.h"

namespace thalweg {

// Queues work on a stream.
using EmulatedQueue = std::function<void(CudaStream, std::function<void()>)>;

// Every launch, fill and copy on the device goes through `queue` from now on; null: runs at once. A
// launch that fails later ends the program, since nobody is left to tell.
// Not while something is queued.
void SetEmulatedQueue(EmulatedQueue queue);

// 0 when `work` is queued, or else what it returns.
LaunchError RunOnStream(CudaStream stream, std::function<LaunchError()> work);

}  // namespace thalweg
