// This header is the common interface of the lossy wire formats of the registry
// (core/base/lossy_formats.h): nodes encode and decode, shards fold the nodes' payloads.
// docs/codecs.md describes the formats byte by byte.
//
// Error feedback: what a chunk lost when it was encoded, its residual, is added to the next one, so
// over time everything arrives. The caller keeps the residuals, which start as zeros.
//
//   Encoded up = EncodeLossy(WireFormat::kInt8, 0, gradient, residual, elems, bytes);   // a node
//   StatusOr<Encoded> down = FoldLossy(payloads, workers, WireFormat::kInt8, elems, shard_residual,
//                                      out);                                            // a shard
//   Status done = DecodeLossy(result, WireFormat::kInt8, DType::kFloat32, elems, gradient);
//
// The same inputs give the same bits on every processor. All functions are thread-safe. All require
// elems ≤ kMaxLossyElems.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/dtype.h"
#include "core/base/payload.h"
#include "core/base/wire_format.h"
#include "kernels/codec/encoded.h"
#include "kernels/codec/feedback.h"

namespace thalweg {

// Encodes x = values + the last residual (x = values without feedback) into at most
// MaxEncodedBytes(format, elems) bytes at `out`; the next residual is x − what the bytes decode to,
// exactly. `topk_ratio`, in (0, 1], is the fraction of the elements that topk sends; the other
// formats ignore it.
//
// Elements of x that are not finite decode to themselves (or their whole block decodes to NaN,
// where the format says so) and never enter a residual, which stays as it was there. They are
// counted in the result. In a format of blocks, elements cut at a multiple of kLossyUnitElems may
// be encoded separately, for instance by several threads, and give the same bytes. Residuals must
// not overlap `values`.
Encoded EncodeLossy(WireFormat format, double topk_ratio, const float* values, Feedback feedback,
                    uint64_t elems, std::byte* out);

// Decodes a chunk of `elems` elements into `out`, as elements of type `bucket`: fp32, or rounded to
// fp16 or bf16. Elements that a topk payload lacks become 0. Returns InvalidArgument when the
// payload is not exactly such a chunk or `bucket` is another type; `out` then holds anything.
absl::Status DecodeLossy(const Payload& payload, WireFormat format, DType bucket, uint64_t elems,
                         void* out);

// Returns how many elements of what DecodeLossy takes are finite in fp32 and infinite in `bucket`.
// Looks at few of them unless many are large. Requires that DecodeLossy has taken the chunk.
uint64_t CountOverflow(const Payload& payload, WireFormat format, DType bucket, uint64_t elems);

// Returns the largest number of bytes that FoldLossy gives; for a dense `format`, the number that
// FoldPayloads gives.
uint64_t MaxFoldedBytes(std::span<const Payload> contributions, WireFormat format, uint64_t elems);

// Folds N ≥ 1 encoded contributions into at most MaxFoldedBytes bytes at `out`: decodes them, takes
// the mean over all workers as FoldPayloads does, and encodes it as EncodeLossy does, with
// `residual` (may be null) for what is lost. Where the mean of a block is zero, the result is,
// too, and leaves `residual` as it is: of what took no part in a step nodes send zeros, and its
// result may be discarded. A topk result has every index that occurs in any
// contribution, loses nothing and leaves `residual` unchanged. Counts the means that are not
// finite. Blocks are folded where they lie; topk payloads in several pieces are first copied
// together. Returns InvalidArgument, with nothing changed, when a payload is not exactly a chunk of
// `elems` elements in that format, a contribution has no worker, or `format` is not a lossy one.
absl::StatusOr<Encoded> FoldLossy(std::span<const Payload> contributions,
                                  std::span<const uint32_t> workers, WireFormat format,
                                  uint64_t elems, float* residual, std::byte* out);

}  // namespace thalweg
