// PowerSgdPlan cuts the matrices of a bucket into pieces of work for a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/codec/powersgd/powersgd.h"

namespace thalweg {

// A PlacedMatrix is a matrix of a bucket, with its position in the arrays of all matrices.
struct PlacedMatrix {
  FactorShape shape;
  uint64_t offset = 0;    // in the gradient, the error and the result
  uint64_t p_offset = 0;  // in the array of rows × rank elements
  uint64_t q_offset = 0;  // in the array of rank × cols elements
};

// A plan is made once for a bucket. It is immutable and thread-safe.
class PowerSgdPlan {
 public:
  // Makes a plan. InvalidArgument names a matrix without elements, with a rank of 0, or with more
  // than 2^31 - 1 rows, columns or a rank above 256.
  static absl::StatusOr<PowerSgdPlan> Make(std::span<const PlacedMatrix> matrices);

  // Returns what the kernels read; copy it to device memory at a multiple of 16 bytes.
  std::span<const std::byte> table() const { return table_; }
  // Returns how much device memory orthogonalising uses, at a multiple of 8 bytes: every vector of
  // the longer factor of each matrix in double.
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  // Returns the number of columns of all factors, those of the first matrix first.
  uint64_t columns() const { return columns_; }

  // These are for kernels/codec: the contents of `table`, and the numbers of blocks that work on
  // them.
  uint32_t matrices() const { return matrices_; }
  uint32_t row_tiles() const { return row_tiles_; }
  uint32_t column_tiles() const { return column_tiles_; }

 private:
  PowerSgdPlan() = default;

  std::vector<std::byte> table_;
  uint64_t workspace_bytes_ = 0;
  uint64_t columns_ = 0;
  uint32_t matrices_ = 0;
  uint32_t row_tiles_ = 0;
  uint32_t column_tiles_ = 0;
};

}  // namespace thalweg
