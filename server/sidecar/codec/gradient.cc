#include "server/sidecar/codec/gradient.h"

#include <cstddef>

namespace thalweg {

const float* Gradient::Read(uint64_t begin, uint64_t elems, std::vector<float>& tile) const {
  const std::vector<const void*> shares = Shares(begin);
  if (share_ == DType::kFloat32 && shares.size() == 1) return static_cast<const float*>(shares[0]);
  tile.resize(elems);
  if (share_ == DType::kFloat32) {
    device_.Encode(shares, DType::kFloat32, DType::kFloat32, elems, tile.data());
    return tile.data();
  }
  // Folded in the workers' own type, as it would be without compression, then widened.
  std::vector<std::byte> narrow(elems * SizeOf(share_));
  device_.Encode(shares, share_, share_, elems, narrow.data());
  device_.Decode(Payload(narrow, nullptr), share_, DType::kFloat32, elems, tile.data())
      .IgnoreError();  // the size is right
  return tile.data();
}

}  // namespace thalweg
