#include "kernels/codec/lossy.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"
#include "kernels/cast/element.h"
#include "kernels/codec/cursor.h"
#include "kernels/codec/int8/int8.h"
#include "kernels/codec/onebit/onebit.h"
#include "kernels/codec/topk/topk.h"
#include "kernels/codec/weighting.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

// Elements that are decoded at a time: whole blocks of every format, few enough to stay in the
// first cache until they are used.
constexpr uint64_t kTileElems = 1024;
constexpr uint64_t kMaxTileBytes = MaxEncodedBytes(WireFormat::kInt8, kTileElems);
static_assert(kTileElems % kInt8BlockElems == 0 && kTileElems % kOneBitBlockElems == 0);
static_assert(kMaxTileBytes >= MaxEncodedBytes(WireFormat::kOneBit, kTileElems));

using Tile = std::array<float, kTileElems>;

// Tiles that are folded at a time.
constexpr size_t kGroup = 4;

// The bytes of a payload that must lie one after the other: where they are, or copied to `storage`.
std::span<const std::byte> Contiguous(const Payload& payload, std::vector<std::byte>& storage) {
  Cursor cursor(payload);
  const size_t bytes = payload.SizeBytes();
  if (bytes == cursor.ContiguousBytes()) return {bytes == 0 ? nullptr : cursor.Data(), bytes};
  storage.resize(bytes);
  cursor.CopyOut(storage.data(), bytes);
  return storage;
}

// Decodes the blocks at `cursor` that make up `elems` ≤ kTileElems elements and moves past them.
void DecodeTile(WireFormat format, Cursor& cursor, uint64_t elems, float* out) {
  const uint64_t bytes = MaxEncodedBytes(format, elems);
  std::array<std::byte, kMaxTileBytes> bridge;
  const std::byte* in = bridge.data();
  if (cursor.ContiguousBytes() >= bytes) {
    in = cursor.Data();
    cursor.Advance(bytes);
  } else {
    cursor.CopyOut(bridge.data(), bytes);
  }
  if (format == WireFormat::kInt8) return DecodeInt8(in, elems, out);
  DecodeOneBit(in, elems, out);
}

absl::Status CheckFormat(WireFormat format, uint64_t elems) {
  if (!IsValid(format) || IsDense(format)) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected one of the formats int8, onebit and "
                     "topk, got ",
                     Name(format), " (", static_cast<int>(format), ")"));
  }
  // Also keeps the sizes computed from `elems`, which comes from a peer, from wrapping around.
  if (elems <= kMaxLossyElems) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("expected at most ", kMaxLossyElems,
                                                 " elements in a chunk of ", Name(format), ", got ",
                                                 elems));
}

absl::Status CheckSize(const std::string& what, const Payload& payload, WireFormat format,
                       uint64_t elems) {
  const uint64_t expected = MaxEncodedBytes(format, elems);
  if (payload.SizeBytes() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected ", expected, " bytes for ",
                                                 elems, " elements of ", Name(format), ", got ",
                                                 payload.SizeBytes()));
}

absl::Status CheckEntries(const std::string& what, std::span<const std::byte> payload,
                          uint64_t elems) {
  const absl::Status status = CheckTopK(payload, elems);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat(what, ": topk payload: ", status.message()));
}

absl::Status DecodeTopKInto(const Payload& payload, DType bucket, uint64_t elems, std::byte* out) {
  std::vector<std::byte> storage;
  const std::span<const std::byte> bytes = Contiguous(payload, storage);
  THALWEG_RETURN_IF_ERROR(CheckEntries("result", bytes, elems));
  if (elems == 0) return absl::OkStatus();
  // All bits 0 is zero in every type.
  std::memset(out, 0, elems * SizeOf(bucket));
  for (TopKEntries entries(bytes); !entries.Done(); entries.Next()) {
    const float value = entries.value();
    Cast(DType::kFloat32, &value, bucket, out + entries.index() * SizeOf(bucket), 1);
  }
  return absl::OkStatus();
}

absl::StatusOr<Encoded> FoldEntries(std::span<const Payload> contributions,
                                    const Weighting& weighting, uint64_t elems, std::byte* out) {
  std::vector<std::vector<std::byte>> storage(contributions.size());
  std::vector<std::span<const std::byte>> payloads;
  for (size_t k = 0; k < contributions.size(); ++k) {
    payloads.push_back(Contiguous(contributions[k], storage[k]));
    THALWEG_RETURN_IF_ERROR(CheckEntries(absl::StrCat("contribution ", k), payloads[k], elems));
  }
  return FoldTopK(payloads, weighting, elems, out);
}

// Decodes `elems` ≤ kTileElems elements of every contribution and folds them into `tiles[0]`. Only
// a few tiles at a time, so that they stay in the first cache: a sum that goes on with weight 1 is
// the same as one that was never interrupted.
void FoldTile(WireFormat format, std::span<Cursor> cursors, const Weighting& weighting,
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
      DecodeTile(format, cursors[k], elems, tiles[count].data());
      inputs[count] = tiles[count].data();
      weights[count] = weighting.weights[k];
    }
    FoldMean(std::span(inputs).first(count), std::span(weights).first(count),
             k == cursors.size() ? weighting.divisor : 1, DType::kFloat32, DType::kFloat32,
             tiles[0].data(), elems);
  }
}

Encoded FoldBlocks(std::span<const Payload> contributions, const Weighting& weighting,
                   WireFormat format, uint64_t elems, float* residual, std::byte* out) {
  std::vector<Cursor> cursors(contributions.begin(), contributions.end());
  std::array<Tile, kGroup> tiles;
  Encoded result;
  for (uint64_t done = 0; done < elems; done += kTileElems) {
    const uint64_t tile_elems = std::min(elems - done, kTileElems);
    FoldTile(format, cursors, weighting, tile_elems, tiles);
    const Encoded encoded =
        EncodeLossy(format, 0, tiles[0].data(), residual == nullptr ? nullptr : residual + done,
                    tile_elems, out + result.bytes);
    result.bytes += encoded.bytes;
    result.nonfinite_elems += encoded.nonfinite_elems;
  }
  return result;
}

}  // namespace

Encoded EncodeLossy(WireFormat format, double topk_ratio, const float* values, float* residual,
                    uint64_t elems, std::byte* out) {
  assert(IsValid(format) && !IsDense(format) && elems <= kMaxLossyElems);
  if (format == WireFormat::kTopK) {
    return EncodeTopK(values, residual, elems, TopKCount(topk_ratio, elems), out);
  }
  const uint64_t nonfinite = format == WireFormat::kInt8
                                 ? EncodeInt8(values, residual, elems, out)
                                 : EncodeOneBit(values, residual, elems, out);
  return {MaxEncodedBytes(format, elems), nonfinite};
}

absl::Status DecodeLossy(const Payload& payload, WireFormat format, DType bucket, uint64_t elems,
                         void* out) {
  THALWEG_RETURN_IF_ERROR(CheckFormat(format, elems));
  if (bucket != DType::kFloat32 && bucket != DType::kFloat16 && bucket != DType::kBFloat16) {
    return absl::InvalidArgumentError(absl::StrCat("decode: a bucket of type ", Name(bucket),
                                                   " never crosses the network as ", Name(format),
                                                   ": expected fp32, fp16 or bf16"));
  }
  auto* to = static_cast<std::byte*>(out);
  if (format == WireFormat::kTopK) return DecodeTopKInto(payload, bucket, elems, to);
  THALWEG_RETURN_IF_ERROR(CheckSize("result", payload, format, elems));
  Cursor cursor(payload);
  for (uint64_t done = 0; done < elems; done += kTileElems) {
    const uint64_t tile_elems = std::min(elems - done, kTileElems);
    if (bucket == DType::kFloat32) {
      DecodeTile(format, cursor, tile_elems, static_cast<float*>(out) + done);
    } else {
      Tile tile;
      DecodeTile(format, cursor, tile_elems, tile.data());
      Cast(DType::kFloat32, tile.data(), bucket, to + done * SizeOf(bucket), tile_elems);
    }
  }
  return absl::OkStatus();
}

uint64_t MaxFoldedBytes(std::span<const Payload> contributions, WireFormat format, uint64_t elems) {
  const uint64_t most = MaxEncodedBytes(format, elems);
  if (HasFixedSize(format)) return most;
  // An entry of the result needs no more bytes than in the contribution that it is from: the gap
  // before it has not grown.
  uint64_t together = 0;
  for (const Payload& contribution : contributions) together += contribution.SizeBytes();
  return std::min(most, together);
}

absl::StatusOr<Encoded> FoldLossy(std::span<const Payload> contributions,
                                  std::span<const uint32_t> workers, WireFormat format,
                                  uint64_t elems, float* residual, std::byte* out) {
  THALWEG_RETURN_IF_ERROR(CheckFormat(format, elems));
  THALWEG_ASSIGN_OR_RETURN(const Weighting weighting, WeightingOf(contributions.size(), workers));
  if (format == WireFormat::kTopK) return FoldEntries(contributions, weighting, elems, out);
  for (size_t k = 0; k < contributions.size(); ++k) {
    THALWEG_RETURN_IF_ERROR(
        CheckSize(absl::StrCat("contribution ", k), contributions[k], format, elems));
  }
  return FoldBlocks(contributions, weighting, format, elems, residual, out);
}

}  // namespace thalweg
