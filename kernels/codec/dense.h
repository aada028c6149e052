// This header decodes chunks in the dense wire formats, and folds encoded ones. The payloads'
// pieces may end anywhere (also inside an element): received data is folded where it lies.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "core/base/fold.h"
#include "core/base/payload.h"

namespace thalweg {

// Folds N ≥ 1 encoded contributions in their given order, as FoldMean does, into `out`, which gets
// `elems` elements of the same wire type. `workers[k]` is the number of workers whose mean
// contribution k is: the result is the mean over all workers. Weights are first divided by their
// greatest common divisor, so with equally large nodes this is the plain sum divided by N. Sets
// `*nonfinite_elems`. Thread-safe. Returns InvalidArgument when a payload has another size than
// elems * SizeOf(wire), a contribution has no worker, or `wire` is not a type.
absl::Status FoldPayloads(std::span<const Payload> contributions, std::span<const uint32_t> workers,
                          DType wire, uint64_t elems, void* out, uint64_t* nonfinite_elems);

// Folds N ≥ 1 encoded contributions as FoldElements does, otherwise as above. Returns
// InvalidArgument also when IsUnweighted(fold) is false.
absl::Status FoldPayloads(Fold fold, std::span<const Payload> contributions, DType wire,
                          uint64_t elems, void* out, uint64_t* nonfinite_elems);

// Decodes a result of `elems` elements of `wire` type into `out` of the bucket's own type `bucket`
// (DenseType(bucket, codec) == wire for some codec). Returns InvalidArgument when the payload's
// size is wrong or no codec sends that bucket in that type. Thread-safe.
absl::Status DecodePayload(const Payload& payload, DType wire, DType bucket, uint64_t elems,
                           void* out);

}  // namespace thalweg
