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

absl::StatusOr<Encoded> FoldWithResidual(const CompleteRound& round, ChunkState& state,
                                         std::byte* out) {
  MutexLock lock(state.mutex);
  state.residual.resize(state.elems);
  Rescale(state.residual, state.loss_scale, round.loss_scale);
  float* const residual = state.residual.data();
  auto encoded = FoldLossy(round.payloads, round.workers, round.wire, round.elems, residual, out);
  for (const ElemRange& range : state.padding) {
    std::fill(residual + range.begin, residual + range.end, 0.0f);
  }
  return encoded;
}

absl::StatusOr<Encoded> FoldInto(const CompleteRound& round, ChunkState* state, std::byte* out) {
  if (HasResidual(round.wire)) return FoldWithResidual(round, *state, out);
  if (!IsDense(round.wire)) {
    return FoldLossy(round.payloads, round.workers, round.wire, round.elems, nullptr, out);
  }
  const DType dtype = DTypeOf(round.wire);
  const Fold fold = round.collective.fold;
  Encoded encoded{round.elems * SizeOf(dtype)};
  THALWEG_RETURN_IF_ERROR(
      fold == Fold::kMean
          ? FoldPayloads(round.payloads, round.workers, dtype, round.elems, out,
                         &encoded.nonfinite_elems)
          : FoldPayloads(fold, round.payloads, dtype, round.elems, out, &encoded.nonfinite_elems));
  return encoded;
}

}  // namespace

absl::StatusOr<RoundResult> FoldRound(const CompleteRound& round, uint64_t epoch,
                                      ChunkState* state) {
  RoundResult result;
  result.id = round.id;
  result.epoch = epoch;
  result.wire = round.wire;
  result.elems = round.elems;
  result.workers = std::accumulate(round.workers.begin(), round.workers.end(), 0u);
  if (round.collective.fold == Fold::kNone) {
    if (!round.payloads.empty()) result.payload = round.payloads.front();
    return result;
  }
  // The buffer is shared, because the same encoded bytes are sent to every node.
  const auto buffer = std::make_shared_for_overwrite<std::byte[]>(
      MaxFoldedBytes(round.payloads, round.wire, round.elems));
  const absl::StatusOr<Encoded> encoded = FoldInto(round, state, buffer.get());
  if (!encoded.ok()) {
    return absl::Status(encoded.status().code(),
                        absl::StrCat(ToString(round.id), ": ", encoded.status().message()));
  }
  result.nonfinite_elems = encoded->nonfinite_elems;
  result.payload = Payload({buffer.get(), encoded->bytes}, buffer);
  return result;
}

}  // namespace thalweg
