#include "server/sidecar/cuda/cuda_power_sgd.h"

#include <algorithm>
#include <utility>

#include "core/base/status_macros.h"
#include "server/sidecar/cuda/cuda_cast.h"

namespace thalweg {
namespace {

template <class T>
absl::StatusOr<T*> AllocateArray(GpuLane& lane, uint64_t count) {
  THALWEG_ASSIGN_OR_RETURN(std::byte* const memory, lane.Allocate(count * sizeof(T)));
  return reinterpret_cast<T*>(memory);
}

template <class T>
absl::StatusOr<T*> AllocateHostArray(GpuLane& lane, uint64_t count) {
  THALWEG_ASSIGN_OR_RETURN(std::byte* const memory, lane.AllocateHost(count * sizeof(T)));
  return reinterpret_cast<T*>(memory);
}

}  // namespace

CudaPowerSgd::CudaPowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number,
                           const CodecSpec& spec, std::unique_ptr<DenseCodec> whole,
                           CudaMemory& memory)
    : PowerSgd(std::move(tensors), place, number, spec, std::move(whole)),
      on_gpu_(tensors_, memory, /*has_residual=*/true) {}

absl::StatusOr<std::unique_ptr<CudaPowerSgd>> CudaPowerSgd::Create(
    TensorSet tensors, const CodecPlace& place, uint32_t number, DType dense, const CodecSpec& spec,
    ParameterStates& states, CudaMemory& memory) {
  auto whole = std::make_unique<CudaCast>(tensors, place, number + 2, dense, memory);
  std::unique_ptr<CudaPowerSgd> codec(
      new CudaPowerSgd(std::move(tensors), place, number, spec, std::move(whole), memory));
  THALWEG_ASSIGN_OR_RETURN(const bool has_matrices, codec->TakeTensors(states));
  if (!has_matrices) return nullptr;
  THALWEG_RETURN_IF_ERROR(codec->MakePlan());
  return codec;
}

absl::Status CudaPowerSgd::MakePlan() {
  std::vector<PlacedMatrix> placed;
  for (const Matrix& m : matrices_) {
    placed.push_back({{m.rows, m.columns, m.rank}, m.set_offset, m.p_offset, m.q_offset});
  }
  for (const Plain& plain : plains_) {
    // The runs of the first part all follow each other.
    if (!runs_.empty() && runs_.back().set_offset + runs_.back().elems == plain.set_offset) {
      runs_.back().elems += plain.elems;
    } else {
      runs_.push_back(plain);
    }
  }
  THALWEG_ASSIGN_OR_RETURN(plan_, PowerSgdPlan::Make(placed));
  return absl::OkStatus();
}

absl::Status CudaPowerSgd::Allocate() {
  THALWEG_RETURN_IF_ERROR(on_gpu_.Allocate());
  THALWEG_RETURN_IF_ERROR(first_factors_.Allocate(lane(), *first_, spec_.wire));
  THALWEG_RETURN_IF_ERROR(second_factors_.Allocate(lane(), *second_, spec_.wire));
  THALWEG_ASSIGN_OR_RETURN(table_, lane().Allocate(plan_->table().size()));
  THALWEG_ASSIGN_OR_RETURN(workspace_, lane().Allocate(plan_->workspace_bytes()));
  THALWEG_ASSIGN_OR_RETURN(q_, AllocateArray<float>(lane(), second_->Elems()));
  THALWEG_ASSIGN_OR_RETURN(zeroed_, AllocateArray<uint32_t>(lane(), plan_->columns()));
  THALWEG_ASSIGN_OR_RETURN(counts_, AllocateArray<uint64_t>(lane(), kCounts));
  THALWEG_ASSIGN_OR_RETURN(host_q_, AllocateHostArray<float>(lane(), second_->Elems()));
  THALWEG_ASSIGN_OR_RETURN(host_zeroed_, AllocateHostArray<uint32_t>(lane(), plan_->columns()));
  THALWEG_ASSIGN_OR_RETURN(host_counts_, AllocateHostArray<uint64_t>(lane(), kCounts));
  THALWEG_ASSIGN_OR_RETURN(no_counts_, AllocateHostArray<uint64_t>(lane(), kCounts));
  std::fill_n(no_counts_, size_t{kCounts}, 0);
  counted_p_ = &lane().MakeProgress(1);
  counted_result_ = &lane().MakeProgress(1);
  made_next_q_ = &lane().MakeProgress(1);
  return absl::OkStatus();
}

absl::Status CudaPowerSgd::QueueConstants() {
  DeviceRuntime& gpu = lane().gpu();
  const std::span<const std::byte> table = plan_->table();
  // A copy from memory that is not registered might wait for the gradient.
  THALWEG_ASSIGN_OR_RETURN(std::byte* const staged, lane().AllocateHost(table.size()));
  std::copy(table.begin(), table.end(), staged);
  THALWEG_RETURN_IF_ERROR(gpu.CopyToDevice(table_, staged, table.size(), lane().stream()));
  if (spec_.feedback) return absl::OkStatus();
  // Without states the residual is zero.
  const std::vector<std::shared_ptr<ParameterState>> none(states_.size());
  THALWEG_RETURN_IF_ERROR(on_gpu_.Load(none));
  THALWEG_ASSIGN_OR_RETURN(zeros_, AllocateArray<float>(lane(), tensors_.Elems()));
  return gpu.Copy(zeros_, on_gpu_.residual(), tensors_.Elems() * sizeof(float), lane().stream());
}

absl::Status CudaPowerSgd::QueueCount(Count count) {
  return lane().gpu().CopyToHost(host_counts_ + count, counts_ + count, sizeof(uint64_t),
                                 lane().stream());
}

bool CudaPowerSgd::IsNextQReady() const {
  return has_next_q_ && spec_.warm && host_counts_[kInQ] == 0 &&
         std::all_of(host_zeroed_, host_zeroed_ + plan_->columns(),
                     [](uint32_t zeroed) { return zeroed == 0; });
}

absl::Status CudaPowerSgd::PrepareQ(FoldPool& pool) {
  // This waits for the last round only, so that nothing here depends on this round's gradient.
  if (has_next_q_) THALWEG_RETURN_IF_ERROR(lane().WaitFor(*made_next_q_, 1));
  if (IsNextQReady()) return absl::OkStatus();
  if (has_next_q_) KeepFactors();
  THALWEG_RETURN_IF_ERROR(PrepareFactors(pool));
  for (const Matrix& m : matrices_) {
    std::copy_n(m.state->factor.data(), m.QElems(), host_q_ + m.q_offset);
  }
  return lane().gpu().CopyToDevice(q_, host_q_, second_factors_.bytes(), lane().stream());
}

absl::Status CudaPowerSgd::Project(FoldPool& pool, Gradient& /*gradient*/) {
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  if (!is_allocated_) {
    THALWEG_RETURN_IF_ERROR(Allocate());
    THALWEG_RETURN_IF_ERROR(QueueConstants());
  }
  is_allocated_ = true;
  THALWEG_RETURN_IF_ERROR(PrepareQ(pool));
  THALWEG_RETURN_IF_ERROR(on_gpu_.Load(states_));
  DeviceRuntime& gpu = lane().gpu();
  THALWEG_RETURN_IF_ERROR(
      gpu.CopyToDevice(counts_, no_counts_, kCounts * sizeof(uint64_t), lane().stream()));
  if (!spec_.feedback) {
    THALWEG_RETURN_IF_ERROR(
        gpu.Copy(on_gpu_.residual(), zeros_, tensors_.Elems() * sizeof(float), lane().stream()));
  }
  THALWEG_ASSIGN_OR_RETURN(values_, on_gpu_.QueueValues());
  THALWEG_RETURN_IF_ERROR(AddErrorAndProjectOnDevice(
      lane().kernel_stream(), *plan_, kernel_memory(), values_, on_gpu_.residual(), q_,
      first_factors_.values(), counts_ + kInGradient));
  for (const Plain& run : runs_) {
    THALWEG_RETURN_IF_ERROR(gpu.Copy(first_factors_.values() + run.sent_offset,
                                     values_ + run.set_offset, run.elems * sizeof(float),
                                     lane().stream()));
  }
  return first_factors_.QueueSending();
}

absl::StatusOr<std::span<const std::byte>> CudaPowerSgd::EncodeFactors(const Part& part,
                                                                       uint32_t chunk,
                                                                       Gradient& gradient) {
  // First for the workers, so that the error names the one whose stream does not get there.
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(tensors_.Elems()));
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  return Of(part).Sent(chunk);
}

absl::Status CudaPowerSgd::DecodeFactors(const Part& part, const RoundResult& received) {
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  return Of(part).Receive(received);
}

absl::StatusOr<bool> CudaPowerSgd::ProjectTransposed(FoldPool& /*pool*/) {
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  THALWEG_RETURN_IF_ERROR(first_factors_.QueueMean());
  THALWEG_RETURN_IF_ERROR(
      OrthogonaliseColumnsOnDevice(lane().kernel_stream(), *plan_, kernel_memory(), spec_.epsilon,
                                   first_factors_.values(), zeroed_, counts_ + kInP));
  counted_p_->Reset();
  THALWEG_RETURN_IF_ERROR(QueueCount(kInP));
  THALWEG_RETURN_IF_ERROR(counted_p_->Mark(lane().gpu(), lane().stream(), 1));
  // Before the count is known, which is nearly always 0: the GPU does not wait for the host.
  THALWEG_RETURN_IF_ERROR(ProjectTransposedOnDevice(lane().kernel_stream(), *plan_, kernel_memory(),
                                                    on_gpu_.residual(), first_factors_.values(),
                                                    second_factors_.values()));
  THALWEG_RETURN_IF_ERROR(second_factors_.QueueSending());
  THALWEG_RETURN_IF_ERROR(lane().WaitFor(*counted_p_, 1));
  return host_counts_[kInP] == 0;
}

absl::StatusOr<bool> CudaPowerSgd::IsQFinite() {
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  THALWEG_RETURN_IF_ERROR(second_factors_.QueueMean());
  counted_p_->Reset();
  THALWEG_RETURN_IF_ERROR(lane().gpu().CopyToHost(host_q_, second_factors_.values(),
                                                  second_factors_.bytes(), lane().stream()));
  THALWEG_RETURN_IF_ERROR(counted_p_->Mark(lane().gpu(), lane().stream(), 1));
  THALWEG_RETURN_IF_ERROR(lane().WaitFor(*counted_p_, 1));
  return AreFinite({host_q_, second_->Elems()});
}

absl::StatusOr<uint64_t> CudaPowerSgd::Reconstruct(FoldPool& /*pool*/) {
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  if (!decides_late_) {  // IsQFinite has done it
    THALWEG_RETURN_IF_ERROR(second_factors_.QueueMean());
  }
  THALWEG_RETURN_IF_ERROR(QueueResult());
  counted_result_->Reset();
  const Count count = IsNarrowed() ? kNarrowed : kInResult;
  THALWEG_RETURN_IF_ERROR(QueueCount(count));
  THALWEG_RETURN_IF_ERROR(counted_result_->Mark(lane().gpu(), lane().stream(), 1));
  THALWEG_RETURN_IF_ERROR(QueueNextQ());
  THALWEG_RETURN_IF_ERROR(lane().WaitFor(*counted_result_, 1));
  if (count == kInResult) return host_counts_[kInResult];
  // Shards have counted what was not finite before it was narrowed, outside the matrices.
  return host_counts_[kNarrowed] - std::min(host_counts_[kNarrowed], first_->nonfinite_elems);
}

absl::Status CudaPowerSgd::QueueResult() {
  using Norm = CudaTensors::Norm;
  const bool is_sampled = IsSampled();
  float* const residual = on_gpu_.residual();
  float* const decoded = on_gpu_.DecodeTarget(0);
  // The matrix to be sent is in the memory in which its residual will be.
  if (is_sampled) THALWEG_RETURN_IF_ERROR(on_gpu_.QueueNorm(Norm::kWhole, residual, nullptr));
  THALWEG_RETURN_IF_ERROR(ReconstructOnDevice(lane().kernel_stream(), *plan_, kernel_memory(),
                                              first_factors_.values(), second_factors_.values(),
                                              residual, decoded, counts_ + kInResult));
  if (is_sampled) THALWEG_RETURN_IF_ERROR(on_gpu_.QueueNorm(Norm::kResidual, residual, nullptr));
  for (const Plain& run : runs_) {
    THALWEG_RETURN_IF_ERROR(lane().gpu().Copy(decoded + run.set_offset,
                                              first_factors_.values() + run.sent_offset,
                                              run.elems * sizeof(float), lane().stream()));
  }
  return on_gpu_.Place(0, tensors_.Elems(), counts_ + kNarrowed);
}

absl::Status CudaPowerSgd::GiveUp(FoldPool& /*pool*/, Gradient& /*gradient*/) {
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  THALWEG_RETURN_IF_ERROR(RestoreErrorOnDevice(lane().kernel_stream(), *plan_, kernel_memory(),
                                               values_, on_gpu_.residual()));
  THALWEG_RETURN_IF_ERROR(
      lane().gpu().Copy(second_factors_.values(), q_, second_factors_.bytes(), lane().stream()));
  return QueueNextQ();
}

absl::Status CudaPowerSgd::QueueNextQ() {
  DeviceRuntime& gpu = lane().gpu();
  const uint64_t bytes = second_factors_.bytes();
  made_next_q_->Reset();
  has_next_q_ = true;
  THALWEG_RETURN_IF_ERROR(
      gpu.CopyToHost(host_q_, second_factors_.values(), bytes, lane().stream()));
  if (spec_.warm) {
    THALWEG_RETURN_IF_ERROR(gpu.Copy(q_, second_factors_.values(), bytes, lane().stream()));
    THALWEG_RETURN_IF_ERROR(OrthogonaliseRowsOnDevice(lane().kernel_stream(), *plan_,
                                                      kernel_memory(), spec_.epsilon, q_, zeroed_,
                                                      counts_ + kInQ));
    THALWEG_RETURN_IF_ERROR(QueueCount(kInQ));
    THALWEG_RETURN_IF_ERROR(gpu.CopyToHost(host_zeroed_, zeroed_,
                                           plan_->columns() * sizeof(uint32_t), lane().stream()));
  }
  return made_next_q_->Mark(gpu, lane().stream(), 1);
}

void CudaPowerSgd::KeepFactors() {
  for (const Matrix& m : matrices_) KeepFactor(m, std::span(host_q_ + m.q_offset, m.QElems()));
}

absl::Status CudaPowerSgd::SaveStates() {
  if (!has_next_q_) return absl::OkStatus();
  THALWEG_RETURN_IF_ERROR(lane().Bind());
  THALWEG_RETURN_IF_ERROR(lane().WaitFor(*made_next_q_, 1));
  KeepFactors();
  has_next_q_ = false;
  return on_gpu_.Save(states_);
}

}  // namespace thalweg
