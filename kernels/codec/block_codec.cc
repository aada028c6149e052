#include "kernels/codec/block_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"
#include "kernels/codec/cursor.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

// This many elements are decoded at a time: they are whole blocks of every format, and few enough
// to stay in the first-level cache until they are used.
constexpr uint64_t kTileElems = kLossyUnitElems;

constexpr uint64_t LargestTileBytes() {
  uint64_t most = 0;
  for (const LossyTraits& lossy : kLossyTraits) {
    if (lossy.block_elems != 0) most = std::max(most, MaxEncodedBytes(lossy.format, kTileElems));
  }
  return most;
}

using Tile = std::array<float, kTileElems>;

// This many tiles are folded at a time.
constexpr size_t kGroup = 4;

absl::Status CheckSize(const std::string& what, const Payload& payload, WireFormat format,
                       uint64_t elems) {
  const uint64_t expected = MaxEncodedBytes(format, elems);
  if (payload.SizeBytes() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected ", expected, " bytes for ",
                                                 elems, " elements of ", Name(format), ", got ",
                                                 payload.SizeBytes()));
}

// Decodes blocks of one format, tile by tile.
class TileDecoder {
 public:
  TileDecoder(WireFormat format, BlockCodec::DecodeBlocks decode)
      : format_(format), decode_(decode) {}

  // Returns the bytes of `elems` ≤ kTileElems elements.
  uint64_t Bytes(uint64_t elems) const {
    return elems == kTileElems ? tile_bytes_ : MaxEncodedBytes(format_, elems);
  }

  // Decodes the blocks at `cursor` that hold `elems` ≤ kTileElems elements and moves past them.
  void operator()(Cursor& cursor, uint64_t elems, float* out) const {
    const uint64_t bytes = Bytes(elems);
    if (cursor.ContiguousBytes() >= bytes) {
      decode_(cursor.Data(), elems, out);
      cursor.Advance(bytes);
    } else {
      std::array<std::byte, LargestTileBytes()> bridge;
      cursor.CopyOut(bridge.data(), bytes);
      decode_(bridge.data(), elems, out);
    }
  }

 private:
  const WireFormat format_;
  const BlockCodec::DecodeBlocks decode_;
  const uint64_t tile_bytes_ = MaxEncodedBytes(format_, kTileElems);
};

// Decodes `elems` ≤ kTileElems elements of every contribution and folds them into `tiles[0]`. It
// folds only a few tiles at a time, so that they stay in the first-level cache: continuing a sum
// with weight 1 gives the same as one uninterrupted sum.
void FoldTile(const TileDecoder& decode, std::span<Cursor> cursors, const Weighting& weighting,
              uint64_t elems, std::array<Tile, kGroup>& tiles) {
  std::array<const void*, kGroup> inputs;
  std::array<float, kGroup> weights;
  for (size_t k = 0; k < cursors.size();) {
    size_t count = 0;
    if (k > 0) {
      inputs[count] = tiles[0].data();
      weights[count++] = 1;
    }
    for (; k < cursors.size() && count < kGroup; ++k, ++count) {
      decode(cursors[k], elems, tiles[count].data());
      inputs[count] = tiles[count].data();
      weights[count] = weighting.weights[k];
    }
    FoldMean(std::span(inputs).first(count), std::span(weights).first(count),
             k == cursors.size() ? weighting.divisor : 1, DType::kFloat32, DType::kFloat32,
             tiles[0].data(), elems);
  }
}

uint64_t CountFiniteFrom(float least, std::span<const float> values) {
  return static_cast<uint64_t>(std::count_if(values.begin(), values.end(), [least](float value) {
    return std::isfinite(value) && std::abs(value) >= least;
  }));
}

bool IsZero(const float* values, uint64_t elems) {
  // Without an early end, so that the compiler makes vectors of it.
  uint32_t magnitudes = 0;
  for (uint64_t i = 0; i < elems; ++i) magnitudes |= std::bit_cast<uint32_t>(values[i]) << 1;
  return magnitudes == 0;
}

}  // namespace

Encoded BlockCodec::Encode(double /*topk_ratio*/, const float* values, Feedback feedback,
                           uint64_t elems, std::byte* out) const {
  return {MaxEncodedBytes(format_, elems), encode_(values, feedback, elems, out)};
}

absl::Status BlockCodec::Decode(const Payload& payload, DType bucket, uint64_t elems,
                                std::byte* out) const {
  THALWEG_RETURN_IF_ERROR(CheckSize("result", payload, format_, elems));
  const TileDecoder decode(format_, decode_);
  Cursor cursor(payload);
  for (uint64_t done = 0; done < elems; done += kTileElems) {
    const uint64_t tile_elems = std::min(elems - done, kTileElems);
    if (bucket == DType::kFloat32) {
      decode(cursor, tile_elems, reinterpret_cast<float*>(out) + done);
    } else {
      Tile tile;
      decode(cursor, tile_elems, tile.data());
      Cast(DType::kFloat32, tile.data(), bucket, out + done * SizeOf(bucket), tile_elems);
    }
  }
  return absl::OkStatus();
}

uint64_t BlockCodec::CountLarge(const Payload& payload, float least, uint64_t elems) const {
  const uint64_t block = FindLossy(format_)->block_elems;
  const uint64_t block_bytes = MaxEncodedBytes(format_, block);
  Cursor cursor(payload);
  std::array<std::byte, LargestTileBytes()> bytes;
  Tile values;
  uint64_t count = 0;
  for (uint64_t done = 0; done < elems; done += block) {
    const uint64_t block_size = std::min(elems - done, block);
    cursor.CopyOut(bytes.data(),
                   block_size == block ? block_bytes : MaxEncodedBytes(format_, block_size));
    float scale = 0;
    std::memcpy(&scale, bytes.data(), sizeof(scale));
    // No element exceeds the scale more than this many times. Of NaN this is false.
    if (!(std::abs(scale) * static_cast<float>(kLossyUnitElems) >= least)) continue;
    decode_(bytes.data(), block_size, values.data());
    count += CountFiniteFrom(least, {values.data(), block_size});
  }
  return count;
}

absl::StatusOr<Encoded> BlockCodec::Fold(std::span<const Payload> contributions,
                                         const Weighting& weighting, uint64_t elems,
                                         float* residual, std::byte* out) const {
  for (size_t k = 0; k < contributions.size(); ++k) {
    THALWEG_RETURN_IF_ERROR(
        CheckSize(absl::StrCat("contribution ", k), contributions[k], format_, elems));
  }
  const TileDecoder decode(format_, decode_);
  std::vector<Cursor> cursors(contributions.begin(), contributions.end());
  std::array<Tile, kGroup> tiles;
  Encoded result;
  for (uint64_t done = 0; done < elems; done += kTileElems) {
    const uint64_t tile_elems = std::min(elems - done, kTileElems);
    FoldTile(decode, cursors, weighting, tile_elems, tiles);
    const float* const mean = tiles[0].data();
    result.nonfinite_elems +=
        residual == nullptr ? encode_(mean, nullptr, tile_elems, out + result.bytes)
                            : EncodeMean(mean, residual + done, tile_elems, out + result.bytes);
    result.bytes += decode.Bytes(tile_elems);
  }
  return result;
}

uint64_t BlockCodec::EncodeMean(const float* mean, float* residual, uint64_t elems,
                                std::byte* out) const {
  const uint64_t block_elems = FindLossy(format_)->block_elems;
  const uint64_t block_bytes = MaxEncodedBytes(format_, block_elems);
  const auto is_zero = [&](uint64_t begin) {
    return IsZero(mean + begin, std::min(elems - begin, block_elems));
  };
  uint64_t nonfinite = 0;
  // Runs of blocks of one kind are encoded at once.
  for (uint64_t begin = 0, end = 0; begin < elems; begin = end) {
    const bool keeps_residual = is_zero(begin);
    do {
      end += block_elems;
    } while (end < elems && is_zero(end) == keeps_residual);
    end = std::min(end, elems);
    nonfinite += encode_(mean + begin, keeps_residual ? nullptr : residual + begin, end - begin,
                         out + begin / block_elems * block_bytes);
  }
  return nonfinite;
}

}  // namespace thalweg
