// This header connects powersgd_cuda.cc, which checks arguments, and the kernels of PowerSGD.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch/stream.h"

namespace thalweg {

// A plan's table has a PowerSgdMatrix for each matrix, then the tiles of rows, then those of
// columns.

struct alignas(16) PowerSgdMatrix {
  uint64_t offset;
  uint64_t p_offset;
  uint64_t q_offset;
  uint64_t workspace_offset;  // in doubles
  uint64_t rows;
  uint64_t cols;
  uint32_t rank;
  uint32_t first_column;  // among those of all matrices
};

// A PowerSgdTile is the work of one block.
struct alignas(16) PowerSgdTile {
  uint32_t matrix;
  uint32_t begin;  // row or column
  uint32_t end;
  uint32_t lanes;  // for rows: how many threads share one, a power of two
};

inline constexpr uint32_t kPowerSgdThreads = 256;
// Threads take this many rows at once in passes 1 and 3: each factor element read is used for as
// many.
inline constexpr uint32_t kRowsAtOnce = 4;
// A tile of pass 2 has this many columns: rows are read in pieces of 128 bytes.
inline constexpr uint32_t kStripColumns = 32;

struct PowerSgdTable {
  const PowerSgdMatrix* matrices;
  const PowerSgdTile* tiles;
};

// `error` may be null.
struct ProjectWork {
  PowerSgdTable table;
  const float* gradient;
  float* error;
  const float* q;
  float* p;
  uint64_t* nonfinite;
};

struct OrthogonaliseWork {
  const PowerSgdMatrix* matrices;
  double* workspace;
  float* factors;
  bool are_rows;  // Q rather than P
  double epsilon;
  uint32_t* zeroed;
  uint64_t* nonfinite;
};

struct TransposedWork {
  PowerSgdTable table;
  const float* x;
  const float* p;
  float* q;
};

// `error` may be null.
struct ReconstructWork {
  PowerSgdTable table;
  const float* p;
  const float* q;
  float* error;
  float* out;
  uint64_t* nonfinite;
};

struct RestoreWork {
  PowerSgdTable table;
  const float* gradient;
  float* error;
};

// Each launch has a block for each tile, or matrix.
LaunchError LaunchProject(CudaStream stream, uint32_t tiles, const ProjectWork& work);
LaunchError LaunchOrthogonalise(CudaStream stream, uint32_t matrices,
                                const OrthogonaliseWork& work);
LaunchError LaunchTransposed(CudaStream stream, uint32_t tiles, const TransposedWork& work);
LaunchError LaunchReconstruct(CudaStream stream, uint32_t tiles, const ReconstructWork& work);
LaunchError LaunchRestore(CudaStream stream, uint32_t tiles, const RestoreWork& work);

}  // namespace thalweg
