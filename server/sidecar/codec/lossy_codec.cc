#include "server/sidecar/codec/lossy_codec.h"

#include <algorithm>

#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// Returns 1 for a format without blocks.
uint64_t BlockElems(WireFormat format) {
  return std::max<uint64_t>(1, FindLossy(format)->block_elems);
}

}  // namespace

LossyCodec::LossyCodec(TensorSet tensors, const CodecPlace& place, uint32_t number,
                       const CodecSpec& spec)
    : OnePartCodec(std::move(tensors).AlignedTo(BlockElems(LossyFormat(spec))), place, number,
                   LossyFormat(spec)),
      spec_(spec),
      format_(LossyFormat(spec)),
      encoded_begins_{0} {
  for (uint32_t chunk = 0; chunk < part_.plan.Count(); ++chunk) {
    encoded_begins_.push_back(encoded_begins_.back() +
                              MaxEncodedBytes(format_, part_.plan.Elems(chunk)));
  }
}

absl::Status LossyCodec::TakeStates(ParameterStates& states) {
  for (const TensorSpec& tensor : tensors_.layout().tensors) {
    THALWEG_ASSIGN_OR_RETURN(auto state, StateOf(states, tensor));
    states_.push_back(std::move(state));
  }
  return absl::OkStatus();
}

bool LossyCodec::HasStarted() const {
  return std::all_of(states_.begin(), states_.end(),
                     [this](const auto& state) { return state->rounds >= spec_.start; });
}

void LossyCodec::CountRound() {
  for (const auto& state : states_) ++state->rounds;
}

const Part* LossyCodec::PartWithShardResiduals() const {
  return HasResidual(format_) ? &part_ : nullptr;
}

void LossyCodec::KeepShardResidual(uint32_t chunk, std::span<const float> residual) {
  const uint64_t begin = part_.plan.Begin(chunk);
  for (const auto& piece : tensors_.TensorPieces(begin, part_.plan.Begin(chunk + 1))) {
    std::vector<float>& kept = states_[piece.tensor]->shard_residual;
    kept.resize(tensors_.layout().tensors[piece.tensor].Elems());
    std::copy_n(residual.data() + (piece.begin - begin), piece.elems, kept.data() + piece.offset);
  }
}

std::vector<float> LossyCodec::ShardResidual(uint32_t chunk) const {
  const uint64_t begin = part_.plan.Begin(chunk);
  std::vector<float> residual;
  for (const auto& piece : tensors_.TensorPieces(begin, part_.plan.Begin(chunk + 1))) {
    const std::vector<float>& kept = states_[piece.tensor]->shard_residual;
    if (kept.empty()) continue;
    residual.resize(part_.plan.Elems(chunk));
    std::copy_n(kept.data() + piece.offset, piece.elems, residual.data() + (piece.begin - begin));
  }
  return residual;
}

void LossyCodec::ForgetShardResiduals() {
  for (const auto& state : states_) state->shard_residual = {};
}

void LossyCodec::ZeroShardResiduals() {
  for (size_t i = 0; i < states_.size(); ++i) {
    std::vector<float>& kept = states_[i]->shard_residual;
    if (kept.empty()) kept.resize(tensors_.layout().tensors[i].Elems());
  }
}

bool LossyCodec::keeps_shard_residuals() const {
  return std::any_of(states_.begin(), states_.end(),
                     [](const auto& state) { return !state->shard_residual.empty(); });
}

}  // namespace thalweg
