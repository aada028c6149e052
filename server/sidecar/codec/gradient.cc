#include "server/sidecar/codec/gradient.h"

#include <cstddef>

#include "kernels/codec/dense.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {

const float* Gradient::Read(uint64_t begin, uint64_t elems, std::vector<float>& tile) const {
  const std::vector<const void*> shares = Shares(begin);
  if (share_ == DType::kFloat32 && shares.size() == 1) return static_cast<const float*>(shares[0]);
  tile.resize(elems);
  if (share_ == DType::kFloat32) {
    FoldShares(shares, DType::kFloat32, DType::kFloat32, elems, tile.data());
    return tile.data();
  }
  // The shares are folded in the workers' own type, as without compression, and then widened.
  std::vector<std::byte> narrow(elems * SizeOf(share_));
  FoldShares(shares, share_, share_, elems, narrow.data());
  DecodePayload(Payload(narrow, nullptr), share_, DType::kFloat32, elems, tile.data())
      .IgnoreError();  // the size is correct
  return tile.data();
}

uint64_t FoldShares(const std::vector<const void*>& shares, DType share, DType wire, uint64_t elems,
                    void* out) {
  const std::vector<float> weights(shares.size(), 1.0f);
  return FoldMean(shares, weights, static_cast<float>(shares.size()), share, wire, out, elems);
}

}  // namespace thalweg
