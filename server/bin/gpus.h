// This header opens the node's GPUs for the sidecar.
#pragma once

#include <memory>

#include "server/sidecar/device/device.h"

namespace thalweg {

// Opens the GPUs and logs what it found. Returns null when the process sees none or the build has
// no CUDA.
std::unique_ptr<Device> OpenGpus();

}  // namespace thalweg
