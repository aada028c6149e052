#include "server/sidecar/codec/bucket_codec.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "core/base/status_macros.h"

namespace thalweg {

absl::Status BucketCodec::FollowLossScale(double loss_scale) {
  const auto states = States();
  const bool changes = std::any_of(states.begin(), states.end(), [&](const auto& state) {
    return state != nullptr && ChangesUnits(state->loss_scale, loss_scale);
  });
  // So rarely that the host can do it, whatever the device.
  if (changes) THALWEG_RETURN_IF_ERROR(SaveStates());
  for (const auto& state : states) {
    if (state == nullptr) continue;
    if (ChangesUnits(state->loss_scale, loss_scale)) state->residual.Own();
    Rescale(state->residual, state->loss_scale, loss_scale);
  }
  return absl::OkStatus();
}

absl::Status BucketCodec::WithholdResiduals(const std::vector<bool>& unused) {
  const auto states = States();
  std::vector<size_t> tensors;
  for (size_t i = 0; !unused.empty() && i < states.size(); ++i) {
    if (states[i] != nullptr && unused[tensors_.BucketNumber(i)]) tensors.push_back(i);
  }
  if (tensors.empty()) return absl::OkStatus();
  // Few scripts leave out parameters: the host does it, whatever the device.
  THALWEG_RETURN_IF_ERROR(SaveStates());
  for (const size_t i : tensors) {
    const std::span<const float> residual = states[i]->residual;
    withheld_.emplace_back(i, std::vector<float>(residual.begin(), residual.end()));
    states[i]->residual = std::vector<float>(residual.size());
  }
  return absl::OkStatus();
}

absl::Status BucketCodec::ReturnResiduals() {
  if (withheld_.empty()) return absl::OkStatus();
  THALWEG_RETURN_IF_ERROR(SaveStates());
  for (const auto& [i, withheld] : withheld_) {
    const std::span<float> residual = NextResidual(i);
    // Other nodes' gradients may have left something, too.
    for (size_t k = 0; k < withheld.size(); ++k) residual[k] += withheld[k];
  }
  withheld_.clear();
  return absl::OkStatus();
}

absl::Status BucketCodec::Scatter(uint64_t begin, uint64_t elems,
                                  const std::function<absl::Status(std::byte*)>& decode) const {
  const size_t size = SizeOf(tensors_.layout().dtype);
  const auto pieces = tensors_.BucketPieces(begin, begin + elems);
  if (pieces[0].elems == elems) return decode(place_.result + pieces[0].offset * size);
  const auto scratch = std::make_unique_for_overwrite<std::byte[]>(elems * size);
  THALWEG_RETURN_IF_ERROR(decode(scratch.get()));
  for (const TensorSet::Piece& piece : pieces) {
    std::memcpy(place_.result + piece.offset * size, scratch.get() + (piece.begin - begin) * size,
                piece.elems * size);
  }
  return absl::OkStatus();
}

}  // namespace thalweg
