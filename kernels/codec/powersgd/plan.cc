#include "kernels/codec/powersgd/plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/codec/powersgd/powersgd_launch.h"

namespace thalweg {
namespace {

constexpr uint64_t kLargestSide = std::numeric_limits<int32_t>::max();
constexpr uint64_t kLargestRank = 256;

// A tile is large enough that starting a block costs little, and small enough that a bucket of 25
// MB has work for all multiprocessors of a GPU.
constexpr uint64_t kPlanTileElems = 16 << 10;

// All threads of a block share a row with more columns: a tile of such rows would be too much work
// for a warp.
constexpr uint64_t kWarpColumns = 1024;

absl::Status Check(const PlacedMatrix& matrix, size_t index) {
  const auto [rows, cols, rank] = matrix.shape;
  if (rows > 0 && cols > 0 && std::max(rows, cols) <= kLargestSide && rank > 0 &&
      rank <= kLargestRank) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("PowerSGD plan: matrix ", index, ": expected 1 to ", kLargestSide,
                   " rows and columns and a rank of 1 to ", kLargestRank, ", got ", rows, " x ",
                   cols, " of rank ", rank, "; send such a tensor uncompressed"));
}

// Returns how many threads share a row, such that accesses of 16 bytes keep them all busy.
uint32_t LanesFor(uint64_t cols) {
  if (cols > kWarpColumns) return kPowerSgdThreads;
  return static_cast<uint32_t>(std::clamp<uint64_t>(std::bit_ceil((cols + 3) / 4), 4, 32));
}

void AddRowTiles(const FactorShape& shape, uint32_t matrix, std::vector<PowerSgdTile>* tiles) {
  const uint32_t lanes = LanesFor(shape.cols);
  const uint64_t at_once = uint64_t{kPowerSgdThreads} / lanes * kRowsAtOnce;
  const uint64_t rows =
      at_once *
      std::max<uint64_t>(1, kPlanTileElems / (std::min(at_once, shape.rows) * shape.cols));
  for (uint64_t begin = 0; begin < shape.rows; begin += rows) {
    tiles->push_back({matrix, static_cast<uint32_t>(begin),
                      static_cast<uint32_t>(std::min<uint64_t>(shape.rows, begin + rows)), lanes});
  }
}

void AddColumnTiles(const FactorShape& shape, uint32_t matrix, std::vector<PowerSgdTile>* tiles) {
  for (uint64_t begin = 0; begin < shape.cols; begin += kStripColumns) {
    const uint64_t end = std::min<uint64_t>(shape.cols, begin + kStripColumns);
    tiles->push_back({matrix, static_cast<uint32_t>(begin), static_cast<uint32_t>(end), 0});
  }
}

template <class T>
void Append(const std::vector<T>& values, std::vector<std::byte>* bytes) {
  static_assert(sizeof(T) % 16 == 0, "so that tiles begin at multiples of 16 bytes");
  const size_t before = bytes->size();
  bytes->resize(before + values.size() * sizeof(T));
  if (!values.empty())
    std::memcpy(bytes->data() + before, values.data(), values.size() * sizeof(T));
}

}  // namespace

absl::StatusOr<PowerSgdPlan> PowerSgdPlan::Make(std::span<const PlacedMatrix> matrices) {
  PowerSgdPlan plan;
  std::vector<PowerSgdMatrix> entries;
  std::vector<PowerSgdTile> row_tiles;
  std::vector<PowerSgdTile> column_tiles;
  uint64_t doubles = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const PlacedMatrix& m = matrices[i];
    THALWEG_RETURN_IF_ERROR(Check(m, i));
    const auto number = static_cast<uint32_t>(i);
    AddRowTiles(m.shape, number, &row_tiles);
    AddColumnTiles(m.shape, number, &column_tiles);
    entries.push_back({m.offset, m.p_offset, m.q_offset, doubles, m.shape.rows, m.shape.cols,
                       static_cast<uint32_t>(m.shape.rank), static_cast<uint32_t>(plan.columns_)});
    doubles += std::max(m.shape.rows, m.shape.cols) * m.shape.rank;
    plan.columns_ += m.shape.rank;
  }
  // Blocks start in this order: the longest columns first, so that none is left alone at the end.
  std::sort(column_tiles.begin(), column_tiles.end(),
            [&](const PowerSgdTile& a, const PowerSgdTile& b) {
              return std::tuple(entries[b.matrix].rows, a.matrix, a.begin) <
                     std::tuple(entries[a.matrix].rows, b.matrix, b.begin);
            });
  plan.matrices_ = static_cast<uint32_t>(entries.size());
  plan.row_tiles_ = static_cast<uint32_t>(row_tiles.size());
  plan.column_tiles_ = static_cast<uint32_t>(column_tiles.size());
  plan.workspace_bytes_ = doubles * sizeof(double);
  Append(entries, &plan.table_);
  Append(row_tiles, &plan.table_);
  Append(column_tiles, &plan.table_);
  return plan;
}

}  // namespace thalweg
