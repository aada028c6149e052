// Payloads in the lossy formats: a payload is a chunk for nodes if it is one for shards, whatever
// pieces it comes in, and what a shard makes of it is a chunk, too. After three bytes that choose
// the format, the bucket's type and the other node's workers, two each say how many elements there
// are and where the payload is cut; the rest is the payload.

#include <cmath>
#include <cstring>
#include <vector>

#include "core/base/fuzzing.h"
#include "kernels/codec/lossy.h"

namespace thalweg {
namespace {

constexpr uint64_t kMostElems = 5000;  // several blocks of every format
constexpr auto kBuckets = std::to_array({DType::kFloat32, DType::kFloat16, DType::kBFloat16});

using Bytes = std::vector<std::byte>;

Payload Cut(std::span<const std::byte> bytes, size_t at) {
  Payload payload;
  at = std::min(at, bytes.size());
  payload.pieces = {bytes.first(at), bytes.subspan(at)};
  return payload;
}

struct Chunk {
  WireFormat format;
  uint64_t elems;
  Payload payload;
};

// Decodes the chunk twice, as it came and in pieces, and returns whether it is one.
bool Decodes(const Chunk& chunk, DType bucket, const Payload& pieces) {
  const size_t size = chunk.elems * SizeOf(bucket);
  Bytes whole(size);
  Bytes cut(size);
  const absl::Status status =
      DecodeLossy(chunk.payload, chunk.format, bucket, chunk.elems, whole.data());
  const absl::Status again = DecodeLossy(pieces, chunk.format, bucket, chunk.elems, cut.data());
  Promise(status.ok() || absl::IsInvalidArgument(status), "a payload is refused as invalid");
  Promise(status.ok() == again.ok(), "pieces do not decide what is refused");
  Promise(!status.ok() || whole == cut, "pieces do not change what is decoded");
  return status.ok();
}

void Fold(const Chunk& chunk, uint32_t workers, bool is_chunk) {
  std::vector<float> zeros(chunk.elems);
  Bytes other(MaxEncodedBytes(chunk.format, chunk.elems));
  other.resize(
      EncodeLossy(chunk.format, 0.1, zeros.data(), nullptr, chunk.elems, other.data()).bytes);
  const std::vector<Payload> contributions = {chunk.payload, Payload(other, nullptr)};
  const std::vector<uint32_t> weights = {1, workers};
  std::vector<float> residual(chunk.elems);
  Bytes folded(MaxFoldedBytes(contributions, chunk.format, chunk.elems));
  const auto result =
      FoldLossy(contributions, weights, chunk.format, chunk.elems, residual.data(), folded.data());
  Promise(result.ok() == is_chunk, "shards and nodes refuse the same payloads");
  for (const float left : residual) Promise(std::isfinite(left), "residuals are finite");
  if (!result.ok()) return;
  Promise(result->bytes <= folded.size(), "a result has bounded length");
  folded.resize(result->bytes);
  std::vector<float> mean(chunk.elems);
  Promise(
      DecodeLossy(Payload(folded, nullptr), chunk.format, DType::kFloat32, chunk.elems, mean.data())
          .ok(),
      "a result is a chunk");
}

void Run(FuzzInput input) {
  const WireFormat format = kLossyTraits[input.Byte() % kLossyTraits.size()].format;
  const DType bucket = kBuckets[input.Byte() % kBuckets.size()];
  const uint32_t workers = 1 + input.Byte();
  const uint64_t elems = input.Short() % kMostElems;
  const size_t cut = input.Short();
  const auto bytes = input.Rest();
  const Chunk chunk{format, elems, Payload(bytes, nullptr)};
  const bool is_chunk = Decodes(chunk, bucket, Cut(bytes, cut));
  Promise(!is_chunk || IsPayloadSize(format, elems, bytes.size()), "a chunk has a chunk's size");
  Fold(chunk, workers, is_chunk);
}

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thalweg::Run(thalweg::FuzzInput(data, size));
  return 0;
}
