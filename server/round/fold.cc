#include "server/round/fold.h"

#include <memory>
#include <numeric>

#include "core/base/status_macros.h"
#include "kernels/codec/codec.h"

namespace thalweg {

absl::StatusOr<RoundResult> Fold(const RoundEngine::CompleteRound& round,
                                 std::span<const uint32_t> workers, uint64_t epoch) {
  const size_t bytes = MaxEncodedBytes(round.wire, round.elems);
  // Shared: the same encoded bytes are sent to every node.
  const auto buffer = std::make_shared_for_overwrite<std::byte[]>(bytes);
  RoundResult result;
  result.id = round.id;
  result.epoch = epoch;
  result.wire = round.wire;
  result.elems = round.elems;
  result.workers = std::accumulate(workers.begin(), workers.end(), 0u);
  THALWEG_RETURN_IF_ERROR(FoldPayloads(round.payloads, workers, DTypeOf(round.wire), round.elems,
                                       buffer.get(), &result.nonfinite_elems));
  result.payload = Payload({buffer.get(), bytes}, buffer);
  return result;
}

}  // namespace thalweg
