// Orthogonalisation of PowerSGD's factors, and the directions with which it starts.
//
// Every node computes these for itself from the same bytes and must get the same bits: all sums are
// in double, in one fixed order, without fused multiply-adds. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace thalweg {

// Makes the columns of `p`, a row-major matrix of p.size() / rank rows, orthonormal to the rounding
// of float32 by Gram–Schmidt in the order of the columns, each projected twice. A column of norm r
// after projection becomes unit · r / (r + epsilon). `rank` ≥ 1, `epsilon` ≥ 0.
//
// A column that lies in the span of those before it up to the rounding of float32, is zero or is
// not finite becomes zero. Returns the indices of such columns, ascending.
// Allocates a copy of `p` in double, once per call.
std::vector<size_t> OrthogonaliseColumns(std::span<float> p, size_t rank, double epsilon);

// The same for the `rank` rows of `q`, of q.size() / rank elements each: Q as it is kept.
std::vector<size_t> OrthogonaliseRows(std::span<float> q, size_t rank, double epsilon);

// Which direction SeedDirection gives. Different values in any member give unrelated directions.
struct DirectionSeed {
  uint64_t seed = 0;       // the job's
  uint64_t parameter = 0;  // a hash of the parameter's name
  uint64_t column = 0;     // of its factor
  uint64_t use = 0;        // how often this column was seeded before
};

// Fills `direction` with pseudo-random numbers, uniform in [-1, 1): to begin with, or in place of a
// column that became zero. Uniform rather than normal numbers because these need no logarithm and
// no cosine, whose last bits differ between C libraries; orthogonalised, they serve as well.
// Element j depends on `seed` and j alone.
void SeedDirection(const DirectionSeed& seed, std::span<float> direction);

}  // namespace thalweg
