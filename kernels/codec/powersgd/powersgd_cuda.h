// This header has PowerSGD's arithmetic on a GPU: the passes of kernels/codec/powersgd/powersgd.h
// and the orthogonalisation of kernels/codec/powersgd/orthogonalise.h for all matrices of a bucket,
// each in one launch. A round is:
//
//   OrthogonaliseRows         Q
//   AddErrorAndProject        G, E, Q → X, P, which is then averaged over the nodes
//   OrthogonaliseColumns      P → P̂
//   ProjectTransposed         X, P̂ → Q, which is then averaged over the nodes
//   Reconstruct               P̂, Q, X → G', E
//
// Values that must agree on all nodes (orthogonalised factors and the result) have the same bits on
// GPUs and processors, so nodes of both kinds may share a job. X, E and Q have the same bits too. P
// does not: its sums are in another order than a processor's, which also differs between rows that
// begin at multiples of 16 bytes and others. The same call always gives the same bits.
//
// Each pass reads and writes what powersgd.h says once, in accesses of 16 bytes for matrices whose
// rows begin at multiples of 16 bytes in all arrays. Factors of 1, 2, 4 and 8 columns are quickest;
// pass 1 and 2 read X again for every 8 columns, or what is left of them, beyond the first.
//
// All pointers are device memory with the alignment of their elements. Nothing allocates or waits.
// InvalidArgument when the plan's memory is not aligned; Internal when CUDA cannot launch.
// Thread-safe; calls that share a workspace must be in one stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/codec/powersgd/plan.h"
#include "kernels/launch/stream.h"

namespace thalweg {

struct PowerSgdMemory {
  const std::byte* table = nullptr;  // a copy of PowerSgdPlan::table(), at a multiple of 16 bytes
  double* workspace = nullptr;       // of PowerSgdPlan::workspace_bytes()
};

// Makes the columns of every P, or the rows of every Q, orthonormal. Sets zeroed[c] to 1 where
// column c of all factors (PowerSgdPlan::columns()) became zero, else to 0, and adds to
// `*nonfinite` how many elements were NaN or infinite before. A sum takes length / 8 additions one
// after the other, which bounds the time of the longest factor.
absl::Status OrthogonaliseColumnsOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                          const PowerSgdMemory& memory, double epsilon, float* p,
                                          uint32_t* zeroed, uint64_t* nonfinite);
absl::Status OrthogonaliseRowsOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                       const PowerSgdMemory& memory, double epsilon, float* q,
                                       uint32_t* zeroed, uint64_t* nonfinite);

// Does pass 1. A null `error` means no error feedback. Adds to `*nonfinite` how many elements of
// matrices in `gradient` are NaN or infinite.
absl::Status AddErrorAndProjectOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                        const PowerSgdMemory& memory, const float* gradient,
                                        float* error, const float* q, float* p,
                                        uint64_t* nonfinite);

// Does pass 2. `x` is the `error` of pass 1 or, without error feedback, its `gradient`.
absl::Status ProjectTransposedOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                       const PowerSgdMemory& memory, const float* x, const float* p,
                                       float* q);

// Does pass 3. `out` may be the gradient's memory. Adds to `*nonfinite` how many results are NaN or
// infinite.
absl::Status ReconstructOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                 const PowerSgdMemory& memory, const float* p, const float* q,
                                 float* error, float* out, uint64_t* nonfinite);

// Gives up a round between passes 1 and 3, with that round's arrays; `error` must not be null.
absl::Status RestoreErrorOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                  const PowerSgdMemory& memory, const float* gradient,
                                  float* error);

}  // namespace thalweg
