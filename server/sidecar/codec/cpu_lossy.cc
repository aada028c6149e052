#include "server/sidecar/codec/cpu_lossy.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/status_macros.h"
#include "kernels/codec/lossy.h"

namespace thalweg {
namespace {

// A tile stays in a core's cache with its residual. Formats with blocks give the same bytes whether
// or not a chunk is cut here, since blocks divide it.
constexpr uint64_t kTileElems = 64 << 10;
static_assert(kTileElems % kLossyUnitElems == 0);

double SquaredNorm(const float* values, uint64_t elems) {
  double sum = 0;
  for (uint64_t i = 0; i < elems; ++i) sum += static_cast<double>(values[i]) * values[i];
  return sum;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CpuLossy>> CpuLossy::Create(TensorSet tensors,
                                                           const CodecPlace& place, uint32_t number,
                                                           const CodecSpec& spec,
                                                           ParameterStates& states) {
  std::unique_ptr<CpuLossy> codec(new CpuLossy(std::move(tensors), place, number, spec));
  THALWEG_RETURN_IF_ERROR(codec->TakeStates(states));
  return codec;
}

absl::StatusOr<Part*> CpuLossy::Begin(FoldPool& /*pool*/, Gradient& /*gradient*/) {
  ForgetOverflow();
  if (encoded_ == nullptr) {
    encoded_ = std::make_unique_for_overwrite<std::byte[]>(encoded_begins().back());
  }
  const auto& tensors = tensors_.layout().tensors;
  for (size_t i = 0; spec_.feedback && i < states_.size(); ++i) {
    states_[i]->residual.Resize(tensors[i].Elems());
  }
  return &part_;
}

absl::StatusOr<std::span<const std::byte>> CpuLossy::Encode(const Part& part, uint32_t chunk,
                                                            Gradient& gradient) {
  const uint64_t begin = part.plan.Begin(chunk);
  const uint64_t end = part.plan.Begin(chunk + 1);
  const auto pieces = tensors_.BucketPieces(begin, end);
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(pieces.back().offset + pieces.back().elems));
  const bool is_sampled = IsSampled();
  CompressionLoss loss;
  std::byte* const out = encoded_.get() + encoded_begins()[chunk];
  uint64_t bytes = 0;
  Tile tile;
  // A format without blocks chooses among all elements of a chunk.
  const uint64_t step = HasFixedSize(format_) ? kTileElems : end - begin;
  for (uint64_t b = begin; b < end; b += step) {
    bytes += EncodeTile(b, std::min(end, b + step), gradient, tile, out + bytes,
                        is_sampled ? &loss : nullptr);
  }
  if (is_sampled) losses_[chunk] = loss;
  return std::span<const std::byte>(out, bytes);
}

const float* CpuLossy::Values(uint64_t begin, uint64_t end, const Gradient& gradient,
                              Tile& tile) const {
  const auto pieces = tensors_.BucketPieces(begin, end);
  if (pieces[0].elems == end - begin) {
    return gradient.Read(pieces[0].offset, pieces[0].elems, tile.share);
  }
  tile.values.assign(end - begin, 0.0f);
  for (const TensorSet::Piece& piece : pieces) {
    const float* values = gradient.Read(piece.offset, piece.elems, tile.share);
    std::copy_n(values, piece.elems, tile.values.data() + (piece.begin - begin));
  }
  return tile.values.data();
}

uint64_t CpuLossy::EncodeTile(uint64_t begin, uint64_t end, const Gradient& gradient, Tile& tile,
                              std::byte* out, CompressionLoss* loss) {
  const uint64_t elems = end - begin;
  const float* values = Values(begin, end, gradient, tile);
  const auto pieces = tensors_.TensorPieces(begin, end);
  const auto of_piece = [&](const TensorSet::Piece& piece) -> Feedback {
    return {states_[piece.tensor]->residual.data() + piece.offset,
            NextResidual(piece.tensor).data() + piece.offset};
  };
  Feedback feedback = nullptr;
  const bool gathered = spec_.feedback && pieces[0].elems < elems;
  if (spec_.feedback && !gathered) feedback = of_piece(pieces[0]);
  if (gathered) {
    tile.residual.assign(elems, 0.0f);
    feedback = tile.residual.data();
    for (const auto& piece : pieces) {
      std::copy_n(of_piece(piece).last, piece.elems, feedback.next + (piece.begin - begin));
    }
  }
  if (loss != nullptr && feedback) {
    for (uint64_t i = 0; i < elems; ++i) {
      const double whole = static_cast<double>(values[i]) + feedback.last[i];
      if (std::isfinite(whole)) loss->whole += whole * whole;
    }
  }
  const Encoded encoded = EncodeLossy(format_, spec_.topk_ratio, values, feedback, elems, out);
  if (loss != nullptr && feedback) {
    for (const auto& piece : pieces) {
      loss->residual += SquaredNorm(feedback.next + (piece.begin - begin), piece.elems);
    }
  }
  if (gathered) {
    for (const auto& piece : pieces) {
      std::copy_n(feedback.next + (piece.begin - begin), piece.elems, of_piece(piece).next);
    }
  }
  return encoded.bytes;
}

absl::Status CpuLossy::Decode(const Part& part, const RoundResult& received) {
  if (part.bucket.update) return DecodeWeights(received);
  const uint64_t begin = part.plan.Begin(received.id.chunk);
  THALWEG_RETURN_IF_ERROR(Scatter(begin, received.elems, [&](std::byte* out) {
    return DecodeLossy(received.payload, format_, tensors_.layout().dtype, received.elems, out);
  }));
  NoteOverflow(received);
  return absl::OkStatus();
}

CompressionLoss CpuLossy::loss() const {
  CompressionLoss sum;
  for (const CompressionLoss& loss : losses_) sum += loss;  // in one order, whoever encoded them
  return sum;
}

}  // namespace thalweg
