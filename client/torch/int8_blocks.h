// Int8Blocks is the wire format int8 (docs/codecs.md) for the rows of sharded models: each tensor
// of a row is whole blocks, the last one filled up with zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace thalweg {

// All tensors are on the CPU, with two dimensions, of which the second is contiguous. Bytes and
// what is held back have the tensors' blocks one after the other.
class Int8Blocks {
 public:
  // The tensors that are encoded: the first column of each in a row, and its number of elements.
  explicit Int8Blocks(const std::vector<std::pair<int64_t, int64_t>>& tensors);

  // Encodes rows of float32 into as many rows of `bytes`. `residual`, which is added first, becomes
  // what is lost. Throws when the shapes or types do not fit. Uses torch's threads.
  void Encode(const at::Tensor& rows, const std::optional<at::Tensor>& residual,
              const at::Tensor& bytes) const;
  // Writes the tensors' columns of rows of float32, float16 or bfloat16.
  void Decode(const at::Tensor& bytes, const at::Tensor& rows) const;

 private:
  // A Span is some blocks of one tensor.
  struct Span {
    int64_t column;  // in a row
    int64_t elems;
    int64_t block;  // in bytes and residual
  };

  std::vector<Span> spans_;
  int64_t columns_ = 0;  // that a row has at least
  int64_t blocks_ = 0;   // of a row
};

}  // namespace thalweg
