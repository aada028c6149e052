// This file defines DefineDeviceOptim() for builds without CUDA.
#include "client/torch/optim_module.h"

namespace thalweg {

void DefineDeviceOptim(pybind11::module_&) {}

}  // namespace thalweg
