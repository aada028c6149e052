// This header orthogonalises PowerSGD's factors and makes their first directions.
//
// Every node computes these independently from the same bytes and must get the same bits: all sums
// are in double, in one fixed order, without fused multiply-adds. Thread-safe.
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
// A column becomes zero if it lies in the span of the previous ones up to the rounding of float32,
// is zero or is not finite. Returns the indices of such columns, ascending. Allocates a copy of `p`
// in double, once per call.
std::vector<size_t> OrthogonaliseColumns(std::span<float> p, size_t rank, double epsilon);

// Does the same for the `rank` rows of `q`, of q.size() / rank elements each: Q as it is stored.
std::vector<size_t> OrthogonaliseRows(std::span<float> q, size_t rank, double epsilon);

// A DirectionSeed selects a direction of SeedDirection. Different values in any member give
// unrelated directions.
struct DirectionSeed {
  uint64_t seed = 0;       // seed of the job
  uint64_t parameter = 0;  // a hash of the parameter's name
  uint64_t column = 0;     // column of its factor
  uint64_t use = 0;        // how often this column was seeded before
};

// Fills `direction` with pseudo-random numbers, uniform in [-1, 1): as a first direction, or in
// place of a column that became zero. The numbers are uniform rather than normal because normal
// ones need a logarithm and a cosine, whose last bits differ between C libraries; orthogonalised,
// they serve as well. Element j depends only on `seed` and j.
void SeedDirection(const DirectionSeed& seed, std::span<float> direction);

}  // namespace thalweg
