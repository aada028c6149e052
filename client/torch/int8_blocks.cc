#include "client/torch/int8_blocks.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/torch/tensor.h"
#include "core/base/lossy_formats.h"
#include "kernels/codec/lossy.h"

namespace thalweg {
namespace {

constexpr int64_t kBlock = FindLossy(WireFormat::kInt8)->block_elems;
constexpr int64_t kBlockBytes = MaxEncodedBytes(WireFormat::kInt8, kBlock);
constexpr int64_t kSpan = 256 * kBlock;  // one thread's, at least

void Check(const at::Tensor& tensor, const char* name, bool fits) {
  const bool rows = tensor.dim() == 2 && (tensor.size(1) < 2 || tensor.stride(1) == 1);
  if (fits && rows && tensor.device().is_cpu()) return;
  Throw(absl::StrCat(name, " of blocks do not fit: ", tensor.toString(), " of ", tensor.dim(),
                     " dimensions"));
}

template <class T>
T* RowOf(const at::Tensor& tensor, int64_t row) {
  return static_cast<T*>(tensor.data_ptr()) + row * tensor.stride(0);
}

void EncodeBlocks(const float* values, float* residual, int64_t elems, std::byte* out) {
  if (elems == 0) return;
  EncodeLossy(WireFormat::kInt8, 0, values, residual, static_cast<uint64_t>(elems), out);
}

void DecodeBlocks(const std::byte* in, DType dtype, int64_t elems, void* out) {
  if (elems == 0) return;
  const Payload payload({in, static_cast<size_t>(elems / kBlock * kBlockBytes)}, nullptr);
  const absl::Status status =
      DecodeLossy(payload, WireFormat::kInt8, dtype, static_cast<uint64_t>(elems), out);
  if (!status.ok()) Throw(std::string(status.message()));
}

}  // namespace

Int8Blocks::Int8Blocks(const std::vector<std::pair<int64_t, int64_t>>& tensors) {
  for (const auto& [column, elems] : tensors) {
    for (int64_t done = 0; done < elems; done += kSpan) {
      const int64_t part = std::min(kSpan, elems - done);
      spans_.push_back({column + done, part, blocks_});
      blocks_ += (part + kBlock - 1) / kBlock;
    }
    columns_ = std::max(columns_, column + elems);
  }
}

void Int8Blocks::Encode(const at::Tensor& rows, const std::optional<at::Tensor>& residual,
                        const at::Tensor& bytes) const {
  Check(rows, "values", rows.scalar_type() == at::kFloat && rows.size(1) >= columns_);
  Check(bytes, "bytes", bytes.size(0) == rows.size(0) && bytes.size(1) == blocks_ * kBlockBytes);
  if (residual) {
    Check(*residual, "residuals",
          residual->scalar_type() == at::kFloat && residual->size(0) == rows.size(0) &&
              residual->size(1) == blocks_ * kBlock);
  }
  const auto count = static_cast<int64_t>(spans_.size());
  at::parallel_for(0, rows.size(0) * count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Span& span = spans_[static_cast<size_t>(i % count)];
      const float* const values = RowOf<const float>(rows, i / count) + span.column;
      float* const held =
          residual ? RowOf<float>(*residual, i / count) + span.block * kBlock : nullptr;
      std::byte* const out = RowOf<std::byte>(bytes, i / count) + span.block * kBlockBytes;
      const int64_t rest = span.elems % kBlock;
      const int64_t whole = span.elems - rest;
      EncodeBlocks(values, held, whole, out);
      if (rest == 0) continue;
      std::array<float, kBlock> last{};
      std::copy_n(values + whole, rest, last.begin());
      EncodeBlocks(last.data(), held == nullptr ? nullptr : held + whole, kBlock,
                   out + whole / kBlock * kBlockBytes);
    }
  });
}

void Int8Blocks::Decode(const at::Tensor& bytes, const at::Tensor& rows) const {
  const at::ScalarType type = rows.scalar_type();
  const DType dtype = type == at::kHalf       ? DType::kFloat16
                      : type == at::kBFloat16 ? DType::kBFloat16
                                              : DType::kFloat32;
  Check(rows, "values",
        (type == at::kFloat || dtype != DType::kFloat32) && rows.size(1) >= columns_);
  Check(bytes, "bytes", bytes.size(0) == rows.size(0) && bytes.size(1) == blocks_ * kBlockBytes);
  const auto count = static_cast<int64_t>(spans_.size());
  const auto size = static_cast<int64_t>(SizeOf(dtype));
  at::parallel_for(0, rows.size(0) * count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Span& span = spans_[static_cast<size_t>(i % count)];
      const std::byte* const in =
          RowOf<const std::byte>(bytes, i / count) + span.block * kBlockBytes;
      std::byte* const row = static_cast<std::byte*>(rows.data_ptr()) +
                             (i / count * rows.stride(0) + span.column) * size;
      const int64_t rest = span.elems % kBlock;
      const int64_t whole = span.elems - rest;
      DecodeBlocks(in, dtype, whole, row);
      if (rest == 0) continue;
      std::array<float, kBlock> last;  // large enough for each type
      DecodeBlocks(in + whole / kBlock * kBlockBytes, dtype, kBlock, last.data());
      std::memcpy(row + whole * size, last.data(), static_cast<size_t>(rest * size));
    }
  });
}

}  // namespace thalweg
