// The registry of the lossy wire formats: one entry for each, from which everything else about a
// format follows. What names no codec (sizes of payloads, cuts of chunks, texts of codecs, folding,
// the sidecar) asks here; the kernels of a format are in its folder of kernels/codec, under the
// names that kernels/codec/lossy_kernels.h derives from the entry's. docs/codecs.md describes the
// formats byte by byte, and how to add one. Compiled for GPUs as well.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

// FORMAT(Name, number, text, traits…): WireFormat::kName has this number on the wire and in ipc,
// never to be given to another format, and users call it `text`. Formats whose payloads are blocks
// of elements, each with a scale of 4 bytes:
#define THALWEG_BLOCK_FORMATS(FORMAT)                                                  \
  FORMAT(Int8, 16, "int8", .block_elems = 256, .elem_bits = 8, .chunk_scale = 4,       \
         .has_shard_residual = true)                                                   \
  FORMAT(OneBit, 17, "onebit", .block_elems = 1024, .elem_bits = 1, .chunk_scale = 16, \
         .has_shard_residual = true)

// All formats.
#define THALWEG_LOSSY_FORMATS(FORMAT)                                               \
  THALWEG_BLOCK_FORMATS(FORMAT)                                                     \
  FORMAT(TopK, 18, "topk", .min_bytes = 4, .elem_bits = 40, .chunk_elems = 1 << 19, \
         .takes_ratio = true)

namespace thalweg {

// A WireFormat says how the values of a chunk cross the network. The dense formats have the numbers
// of their element type (dtype.h). Never renumber.
enum class WireFormat : uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat64 = 4,
  kDenseUInt8 = 5,
  kDenseInt8 = 6,
  kDenseInt16 = 7,
  kDenseInt32 = 8,
  kDenseInt64 = 9,
#define THALWEG_ENUMERATOR(Name, number, ...) k##Name = number,
  THALWEG_LOSSY_FORMATS(THALWEG_ENUMERATOR)
#undef THALWEG_ENUMERATOR
};

// A LossyTraits holds what is known of a lossy format without its kernels.
struct LossyTraits {
  WireFormat format = WireFormat::kFloat32;
  const char* name = "";
  uint64_t min_bytes = 0;  // that any payload has
  // Elements of a block; chunks may be cut between blocks and have the same bytes. 0: a chunk is
  // encoded as a whole, and how many bytes it takes depends on its values.
  uint64_t block_elems = 0;
  uint32_t elem_bits = 0;  // at most
  // A chunk has this many times the elements of a dense chunk, so that as many bytes cross.
  uint32_t chunk_scale = 1;
  // Where what crosses depends on how chunks are cut, they have this many elements on all links and
  // with any number of shards, so that results are the same; 0: it does not.
  uint64_t chunk_elems = 0;
  bool has_shard_residual = false;  // encoding a mean loses something
  bool takes_ratio = false;         // what share of the elements crosses is for the user to say
};

inline constexpr uint64_t kBlockScaleBytes = 4;

inline constexpr auto kLossyTraits = std::to_array<LossyTraits>({
#define THALWEG_TRAITS(Name, number, text, ...) \
  {.format = WireFormat::k##Name, .name = text, __VA_ARGS__},
    THALWEG_LOSSY_FORMATS(THALWEG_TRAITS)
#undef THALWEG_TRAITS
});

// Returns nothing when `format` is not a lossy one. The value is a copy, because under UBSan GCC
// does not take the comparison of an address with null for a constant.
constexpr std::optional<LossyTraits> FindLossy(WireFormat format) {
  for (const LossyTraits& traits : kLossyTraits) {
    if (traits.format == format) return traits;
  }
  return std::nullopt;
}

// Blocks of every format divide this many elements.
inline constexpr uint64_t kLossyUnitElems = 1024;
static_assert([] {
  for (const LossyTraits& traits : kLossyTraits) {
    if (traits.block_elems != 0 && kLossyUnitElems % traits.block_elems != 0) return false;
  }
  return true;
}());

// Most elements of one chunk in a lossy format.
inline constexpr uint64_t kMaxLossyElems = 0xffffffff;

}  // namespace thalweg
