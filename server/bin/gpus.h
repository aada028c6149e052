// The node's GPUs, as the sidecar uses them.
#pragma once

#include <memory>

#include "server/sidecar/device/device.h"

namespace thalweg {

// Null when this process sees none, or this build is without CUDA. Says in the log what there is.
std::unique_ptr<Device> OpenGpus();

}  // namespace thalweg
