// This file defines OpenGpus() for builds without CUDA.
#include "server/bin/gpus.h"

namespace thalweg {

std::unique_ptr<Device> OpenGpus() { return nullptr; }

}  // namespace thalweg
