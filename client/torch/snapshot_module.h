// This header declares the part of thalweg._C that reads snapshots; _C.pyi has it in Python's
// terms.
#pragma once

#include <pybind11/pybind11.h>

namespace thalweg {

// Defines read_snapshot and read_snapshot_header.
void DefineSnapshots(pybind11::module_& m);

}  // namespace thalweg
