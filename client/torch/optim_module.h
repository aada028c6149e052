// This header declares the part of thalweg._C that thalweg.optim uses; _C.pyi has it in Python's
// terms.
#pragma once

#include <pybind11/pybind11.h>

namespace thalweg {

// Defines FusedTensors, and the settings that FusedDeviceTensors takes as well.
void DefineOptim(pybind11::module_& m);

// Defines FusedDeviceTensors; nothing in a build without CUDA.
void DefineDeviceOptim(pybind11::module_& m);

}  // namespace thalweg
