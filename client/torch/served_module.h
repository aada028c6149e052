// This header declares the part of thalweg._C through which shards keep weights; _C.pyi has it in
// Python's terms.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/core/session.h"

namespace thalweg {

// Defines ServedBucket and total_of_squares.
void DefineServed(pybind11::module_& m);

// Is Session.set_settings. Throws.
void SetSettings(Session& session, uint64_t number,
                 const std::vector<std::map<std::string, double>>& groups, double grad_scale,
                 double max_grad_norm, double grad_squares, bool measures, bool waits_for_all,
                 bool gives_nothing);

}  // namespace thalweg
