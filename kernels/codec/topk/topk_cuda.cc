#include "kernels/codec/topk/topk_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/lossy_formats.h"
#include "kernels/codec/topk/topk_launch.h"
#include "kernels/launch/status.h"

namespace thalweg {
namespace {

// A Layout gives the offsets in the scratch memory.
struct Layout {
  explicit Layout(uint64_t elems) {
    const uint64_t tile_count = (elems + kTopKTileElems - 1) / kTopKTileElems;
    tiles = sizeof(TopKState);
    bits = tiles + tile_count * sizeof(TopKTile);
    offsets = bits + tile_count * kTopKTileElems * sizeof(uint32_t);
    bytes = offsets + tile_count * kTopKTileElems * sizeof(uint16_t);
  }

  uint64_t tiles;
  uint64_t bits;
  uint64_t offsets;
  uint64_t bytes;
};
static_assert(sizeof(TopKState) % alignof(TopKTile) == 0);

}  // namespace

uint64_t TopKScratchBytes(uint64_t elems) { return Layout(elems).bytes; }

absl::Status EncodeTopKOnDevice(CudaStream stream, const float* values, float* residual,
                                uint64_t elems, uint64_t count, std::byte* out, Encoded* encoded,
                                void* scratch) {
  if (elems > kMaxLossyElems || count == 0) {
    return absl::InvalidArgumentError(absl::StrCat("device encode of topk: expected at most ",
                                                   kMaxLossyElems, " elements and a count, got ",
                                                   elems, " and ", count));
  }
  const Layout layout(elems);
  auto* const memory = static_cast<std::byte*>(scratch);
  TopKWork work;
  work.values = values;
  work.residual = residual;
  work.elems = elems;
  work.wanted = static_cast<uint32_t>(std::min(count, kMaxLossyElems));
  work.out = out;
  work.encoded = encoded;
  work.state = reinterpret_cast<TopKState*>(memory);
  work.tiles = reinterpret_cast<TopKTile*>(memory + layout.tiles);
  work.bits = reinterpret_cast<uint32_t*>(memory + layout.bits);
  work.offsets = reinterpret_cast<uint16_t*>(memory + layout.offsets);
  return LaunchStatus(LaunchEncodeTopK(stream, work), "device encode of topk");
}

absl::Status ScatterTopKOnDevice(CudaStream stream, const uint32_t* indices, const float* values,
                                 uint64_t count, float* out, uint64_t elems) {
  return LaunchStatus(LaunchScatterTopK(stream, indices, values, count, out, elems),
                      "device decode of topk");
}

}  // namespace thalweg
