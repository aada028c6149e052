#include "server/sidecar/codec/one_part_codec.h"

#include <cstddef>
#include <vector>

#include "core/base/status_macros.h"
#include "kernels/codec/dense.h"
#include "kernels/codec/lossy.h"

namespace thalweg {

absl::Status OnePartCodec::DecodeWeights(const RoundResult& received) const {
  const DType type = tensors_.layout().dtype;
  const uint64_t begin = part_.plan.Begin(received.id.chunk);
  // The part has the bucket's tensors as they lie in the bucket.
  std::byte* const out = place_.result + begin * SizeOf(type);
  if (IsDense(received.wire)) {
    return DecodePayload(received.payload, DTypeOf(received.wire), type, received.elems, out);
  }
  std::vector<float> difference(received.elems);
  THALWEG_RETURN_IF_ERROR(DecodeLossy(received.payload, received.wire, DType::kFloat32,
                                      received.elems, difference.data()));
  auto* const weights = reinterpret_cast<float*>(out);
  for (uint64_t i = 0; i < received.elems; ++i) weights[i] += difference[i];
  return absl::OkStatus();
}

}  // namespace thalweg
