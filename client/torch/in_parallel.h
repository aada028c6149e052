// This header runs work on many tensors in torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

#include "kernels/optim/flat_index.h"

namespace thalweg {

// Calls body(begin, end) for ranges that together cover `index`, in one parallel region. Sources
// that include this header are compiled with -fopenmp.
template <class Body>
void InParallel(const FlatIndex& index, const Body& body) {
  // with less work, another thread costs more than it gains
  constexpr int64_t kGrainBytes = 128 << 10;
  at::parallel_for(0, static_cast<int64_t>(index.Size()), kGrainBytes,
                   [&](int64_t begin, int64_t end) {
                     body(static_cast<uint64_t>(begin), static_cast<uint64_t>(end));
                   });
}

}  // namespace thalweg
