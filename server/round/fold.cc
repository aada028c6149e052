#include "server/round/fold.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/codec/dense.h"
#include "kernels/codec/lossy.h"

namespace thalweg {
namespace {

absl::StatusOr<Encoded> FoldWithResidual(const RoundEngine::CompleteRound& round,
                                         std::span<const uint32_t> workers, Residual& residual,
                                         std::byte* out) {
  MutexLock lock(residual.mutex);
  residual.values.resize(residual.elems);
  Rescale(residual.values, residual.loss_scale, round.loss_scale);
  float* const values = residual.values.data();
  auto encoded = FoldLossy(round.payloads, workers, round.wire, round.elems, values, out);
  for (const ElemRange& range : residual.padding) {
    std::fill(values + range.begin, values + range.end, 0.0f);
  }
  return encoded;
}

absl::StatusOr<Encoded> FoldInto(const RoundEngine::CompleteRound& round,
                                 std::span<const uint32_t> workers, Residual* residual,
                                 std::byte* out) {
  if (residual != nullptr) return FoldWithResidual(round, workers, *residual, out);
  if (!IsDense(round.wire)) {
    return FoldLossy(round.payloads, workers, round.wire, round.elems, nullptr, out);
  }
  const DType dtype = DTypeOf(round.wire);
  Encoded encoded{round.elems * SizeOf(dtype)};
  THALWEG_RETURN_IF_ERROR(
      FoldPayloads(round.payloads, workers, dtype, round.elems, out, &encoded.nonfinite_elems));
  return encoded;
}

}  // namespace

absl::StatusOr<RoundResult> Fold(const RoundEngine::CompleteRound& round,
                                 std::span<const uint32_t> workers, uint64_t epoch,
                                 Residual* residual) {
  // The buffer is shared, because the same encoded bytes are sent to every node.
  const auto buffer = std::make_shared_for_overwrite<std::byte[]>(
      MaxFoldedBytes(round.payloads, round.wire, round.elems));
  const absl::StatusOr<Encoded> encoded = FoldInto(round, workers, residual, buffer.get());
  if (!encoded.ok()) {
    return absl::Status(
        encoded.status().code(),
        absl::StrCat("bucket ", ToString(round.id.bucket), " round ", round.id.round, " chunk ",
                     round.id.chunk, ": ", encoded.status().message()));
  }
  RoundResult result;
  result.id = round.id;
  result.epoch = epoch;
  result.wire = round.wire;
  result.elems = round.elems;
  result.workers = std::accumulate(workers.begin(), workers.end(), 0u);
  result.nonfinite_elems = encoded->nonfinite_elems;
  result.payload = Payload({buffer.get(), encoded->bytes}, buffer);
  return result;
}

}  // namespace thalweg
