// This header has PowerSGD's arithmetic on one gradient: X of n rows and m columns is sent as two
// thin factors, and what they miss is added to the next gradient.
//
//   X = G + E              the gradient and the error of earlier rounds
//   P = X·Q                n × k; summed over the nodes, then orthogonalised to P̂ (orthogonalise.h)
//   Q = Xᵀ·P̂               m × k; averaged over the nodes
//   G' = P̂·Qᵀ, E = X − G'  what the optimizer gets, and what it did not get
//
// in three passes over X's memory. Matrices are row-major: element (i, j) of X is at x[i·m + j] and
// P's at p[i·k + c]. Q is kept transposed, k × m: its column c is q[c·m …]. Pointers need the
// alignment of a float, no more. Nothing here allocates; all functions are thread-safe.
//
// Rows of X are independent in passes 1 and 3, columns in pass 2, so a caller may cut the work into
// blocks as it likes and gets the same bits.
//
//   G, E → AddErrorAndProject → X, P → (sum, OrthogonaliseColumns) → P̂
//   X, P̂ → ProjectTransposed → Q → (mean)
//   P̂, Q → Reconstruct → G', E        or, when the round is given up:  G, X → RestoreError → E
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace thalweg {

// A FactorShape describes a matrix, or some whole rows of one, and its factors.
struct FactorShape {
  size_t rows = 0;  // n
  size_t cols = 0;  // m
  size_t rank = 0;  // k ≥ 1
};

// Returns the rank of the factors of a matrix when at most `rank` is wanted: no more than it can
// have.
size_t FactorRank(size_t rows, size_t cols, size_t rank);

// Returns whether the factors of a matrix of rows × cols are smaller than it by more than
// `min_rate`: (rows + cols) · FactorRank · min_rate < rows · cols. It is always false for a vector.
bool Compresses(size_t rows, size_t cols, size_t rank, double min_rate);

// Does pass 1 for some rows: X = G + E, stored in `x`, which may be `error`'s memory, and P = X·Q.
// `gradient`, `error` and `x` hold rows · cols elements, `q` rank · cols, `p` gets rows · rank. An
// empty `error`, and then `x`, means no error feedback: X is `gradient` itself. Returns how many
// elements of `gradient` are NaN or infinite. X is E there, and is never made infinite: a sum that
// overflows is stored as the largest finite number. A row of X with such an element gives a
// non-finite row of P, so that the average of P shows it.
uint64_t AddErrorAndProject(const FactorShape& block, std::span<const float> gradient,
                            std::span<const float> error, std::span<float> x,
                            std::span<const float> q, std::span<float> p);

// Gives up a round between passes 1 and 3: turns X, which AddErrorAndProject left in `error`, back
// into E = X − G, up to the rounding of that sum. G is the same `gradient` as then; where it is not
// finite `error` is unchanged. Both may be any pieces of equal length.
void RestoreError(std::span<const float> gradient, std::span<float> error);

// Does pass 2 for columns [col_begin, col_end): Q = Xᵀ·P. `x` is the whole matrix, that of pass 1
// or, without error feedback, its `gradient`; `p` is rows · rank. Only those columns of `q`,
// which is whole as well, are written. Sums of 8 rows each, one fused multiply-add per row from
// zero, are added in the order of rows: the same bits on every processor. Blocks of a multiple of
// 64 columns keep vectors full.
void ProjectTransposed(const FactorShape& shape, std::span<const float> x, std::span<const float> p,
                       size_t col_begin, size_t col_end, std::span<float> q);

// Does pass 3 for some rows: `out` = P·Qᵀ, and E = X − `out` in place of X. `out` may be the
// gradient's memory; an empty `error` means no error feedback. Each element is the product of the
// factors' first columns, then one fused multiply-add per column: the same bits on every processor,
// which keeps the replicas equal. Returns how many elements of `out` are NaN or infinite. They are
// stored, every NaN as the same one; `error` keeps X there, so that it stays finite.
uint64_t Reconstruct(const FactorShape& block, std::span<const float> p, std::span<const float> q,
                     std::span<float> error, std::span<float> out);

}  // namespace thalweg
