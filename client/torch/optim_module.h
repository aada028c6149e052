// The fused optimizers' part of thalweg._C.
#pragma once

#include <pybind11/pybind11.h>

namespace thalweg {

// Adds FusedTensors, NotFusable and check_fusable; _C.pyi has them in Python's terms.
void DefineOptim(pybind11::module_& m);

}  // namespace thalweg
