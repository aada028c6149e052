#include "server/sidecar/cuda/cuda_tensors.h"

#include <algorithm>

#include "core/base/status_macros.h"
#include "kernels/cast/cast_cuda.h"
#include "kernels/reduce/norm_cuda.h"
#include "kernels/reduce/reduce_cuda.h"

namespace thalweg {
namespace {

absl::StatusOr<float*> AllocateFloats(GpuLane& lane, uint64_t count) {
  THALWEG_ASSIGN_OR_RETURN(std::byte* const memory, lane.Allocate(count * sizeof(float)));
  return reinterpret_cast<float*>(memory);
}

// Returns the element of the set at which a piece ends.
uint64_t EndOf(const TensorSet::Piece& piece) { return piece.begin + piece.elems; }

double Sum(const double* partials, uint64_t count) {
  double sum = 0;
  for (uint64_t i = 0; i < count; ++i) sum += partials[i];
  return sum;
}

}  // namespace

absl::Status CudaTensors::ClearPadding(void* array, size_t size) {
  for (size_t i = 1; i < pieces_.size(); ++i) {
    const uint64_t begin = EndOf(pieces_[i - 1]);
    const uint64_t elems = pieces_[i].begin - begin;
    if (elems == 0) continue;
    THALWEG_RETURN_IF_ERROR(lane().gpu().Copy(static_cast<std::byte*>(array) + begin * size, zeros_,
                                              elems * size, lane().stream()));
  }
  return absl::OkStatus();
}

absl::Status CudaTensors::ClearResidualOfPadding() {
  return ClearPadding(residual_, sizeof(float));
}

absl::Status CudaTensors::AllocateZeros() {
  uint64_t most = 0;
  for (size_t i = 1; i < pieces_.size(); ++i) {
    most = std::max(most, pieces_[i].begin - EndOf(pieces_[i - 1]));
  }
  if (most == 0) return absl::OkStatus();
  const uint64_t bytes = most * sizeof(float);
  THALWEG_ASSIGN_OR_RETURN(zeros_, lane().Allocate(bytes));
  THALWEG_ASSIGN_OR_RETURN(std::byte* const staged, lane().AllocateHost(bytes));
  std::fill_n(staged, bytes, std::byte{0});
  return lane().gpu().CopyToDevice(zeros_, staged, bytes, lane().stream());
}

absl::Status CudaTensors::Allocate() {
  const uint64_t elems = tensors_.Elems();
  const uint64_t partials = 2 * SquaredNormPartials(elems) * sizeof(double);
  const bool is_float = memory_.share() == DType::kFloat32;
  const bool is_there = is_float && IsOnePiece() && memory_.Shares(0).size() == 1;
  if (!is_there) {
    THALWEG_ASSIGN_OR_RETURN(values_, AllocateFloats(lane(), elems));
  }
  if (!is_float) {
    THALWEG_ASSIGN_OR_RETURN(narrow_, lane().Allocate(elems * SizeOf(memory_.share())));
  }
  THALWEG_RETURN_IF_ERROR(AllocateZeros());
  // Later rounds leave the padding as it is.
  THALWEG_RETURN_IF_ERROR(is_float ? ClearPadding(values_, sizeof(float))
                                   : ClearPadding(narrow_, SizeOf(memory_.share())));
  if (tensors_.layout().dtype != DType::kFloat32 || !IsOnePiece()) {
    THALWEG_ASSIGN_OR_RETURN(decoded_, AllocateFloats(lane(), elems));
  }
  THALWEG_ASSIGN_OR_RETURN(std::byte* const on_gpu, lane().Allocate(partials));
  partials_ = reinterpret_cast<double*>(on_gpu);
  if (!has_residual_) return absl::OkStatus();
  THALWEG_ASSIGN_OR_RETURN(residual_, AllocateFloats(lane(), elems));
  THALWEG_ASSIGN_OR_RETURN(std::byte* const norms, lane().AllocateHost(partials));
  norms_ = reinterpret_cast<double*>(norms);
  std::fill_n(norms_, 2 * SquaredNormPartials(elems), 0.0);
  THALWEG_ASSIGN_OR_RETURN(std::byte* const staged, lane().AllocateHost(elems * sizeof(float)));
  staged_ = reinterpret_cast<float*>(staged);
  saved_ = &lane().MakeProgress(1);
  return absl::OkStatus();
}

absl::Status CudaTensors::Load(States states) {
  if (!has_residual_ || is_loaded_) return absl::OkStatus();
  std::fill_n(staged_, tensors_.Elems(), 0.0f);
  for (const auto& piece : tensors_.TensorPieces(0, tensors_.Elems())) {
    if (states[piece.tensor] == nullptr) continue;
    Residual& residual = states[piece.tensor]->residual;
    residual.Resize(tensors_.layout().tensors[piece.tensor].Elems());
    std::copy_n(residual.data() + piece.offset, piece.elems, staged_ + piece.begin);
  }
  is_loaded_ = true;
  return lane().gpu().CopyToDevice(residual_, staged_, tensors_.Elems() * sizeof(float),
                                   lane().stream());
}

absl::Status CudaTensors::Save(States states) {
  if (!is_loaded_) return absl::OkStatus();
  saved_->Reset();
  THALWEG_RETURN_IF_ERROR(lane().gpu().CopyToHost(
      staged_, residual_, tensors_.Elems() * sizeof(float), lane().stream()));
  THALWEG_RETURN_IF_ERROR(saved_->Mark(lane().gpu(), lane().stream(), 1));
  THALWEG_RETURN_IF_ERROR(lane().WaitFor(*saved_, 1));
  for (const auto& piece : tensors_.TensorPieces(0, tensors_.Elems())) {
    if (states[piece.tensor] == nullptr) continue;
    Residual& residual = states[piece.tensor]->residual;
    residual.Resize(tensors_.layout().tensors[piece.tensor].Elems());
    std::copy_n(staged_ + piece.begin, piece.elems, residual.data() + piece.offset);
  }
  is_loaded_ = false;
  return absl::OkStatus();
}

absl::StatusOr<const float*> CudaTensors::QueueValues() {
  if (values_ == nullptr) {
    return static_cast<const float*>(memory_.Shares(pieces_[0].offset)[0]);
  }
  const DType share = memory_.share();
  const size_t size = SizeOf(share);
  std::byte* const mean = narrow_ == nullptr ? reinterpret_cast<std::byte*>(values_) : narrow_;
  // The shards count what is not finite; this count nobody reads.
  auto* const nonfinite = reinterpret_cast<uint64_t*>(partials_);
  for (const TensorSet::Piece& piece : pieces_) {
    const auto shares = memory_.Shares(piece.offset);
    THALWEG_RETURN_IF_ERROR(FoldMeanOnDevice(lane().kernel_stream(), shares,
                                             std::vector<float>(shares.size(), 1.0f),
                                             static_cast<float>(shares.size()), share, share,
                                             mean + piece.begin * size, piece.elems, nonfinite));
  }
  // Folded in the workers' own type, as it would be without compression, then widened.
  if (narrow_ != nullptr) {
    THALWEG_RETURN_IF_ERROR(CastOnDevice(lane().kernel_stream(), share, narrow_, DType::kFloat32,
                                         values_, tensors_.Elems()));
  }
  return values_;
}

absl::Status CudaTensors::QueueNorm(Norm which, const float* a, const float* b) {
  const uint64_t count = SquaredNormPartials(tensors_.Elems());
  const uint64_t begin = which == Norm::kWhole ? 0 : count;
  double* const partials = partials_ + begin;
  THALWEG_RETURN_IF_ERROR(
      SquaredNormOnDevice(lane().kernel_stream(), a, b, tensors_.Elems(), partials));
  return lane().gpu().CopyToHost(norms_ + begin, partials, count * sizeof(double), lane().stream());
}

CompressionLoss CudaTensors::loss() const {
  if (norms_ == nullptr) return {};
  const uint64_t count = SquaredNormPartials(tensors_.Elems());
  return {.residual = Sum(norms_ + count, count), .whole = Sum(norms_, count)};
}

float* CudaTensors::DecodeTarget(uint64_t begin) const {
  if (decoded_ != nullptr) return decoded_ + begin;
  return reinterpret_cast<float*>(Result(pieces_[0].offset + begin));
}

absl::Status CudaTensors::Place(uint64_t begin, uint64_t end, uint64_t* narrowed) {
  if (decoded_ == nullptr) return absl::OkStatus();
  const CudaStream stream = lane().kernel_stream();
  const DType dtype = tensors_.layout().dtype;
  for (const TensorSet::Piece& piece : tensors_.BucketPieces(begin, end)) {
    const float* const from = decoded_ + piece.begin;
    std::byte* const to = Result(piece.offset);
    // The mean of one is a cast that counts.
    THALWEG_RETURN_IF_ERROR(
        narrowed == nullptr
            ? CastOnDevice(stream, DType::kFloat32, from, dtype, to, piece.elems)
            : FoldMeanOnDevice(stream, std::vector<const void*>{from}, std::vector<float>{1.0f},
                               1.0f, DType::kFloat32, dtype, to, piece.elems, narrowed));
  }
  return absl::OkStatus();
}

}  // namespace thalweg
