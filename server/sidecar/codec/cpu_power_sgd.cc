#include "server/sidecar/codec/cpu_power_sgd.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/base/status_macros.h"
#include "kernels/codec/dense.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "server/sidecar/codec/cast_codec.h"

namespace thalweg {
namespace {

// A task is large enough that handing it out costs little, and small enough that its tile and the
// factors stay in a core's cache.
constexpr uint64_t kTaskElems = 64 << 10;
constexpr uint64_t kTaskColumns = 256;

CompressionLoss LossOf(std::span<const float> decoded, std::span<const float> residual) {
  CompressionLoss loss;
  for (size_t i = 0; i < decoded.size(); ++i) {
    const double left = residual[i];
    const double sent = decoded[i];
    loss.residual += left * left;
    loss.whole += (sent + left) * (sent + left);
  }
  return loss;
}

}  // namespace

CpuPowerSgd::CpuPowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number,
                         const CodecSpec& spec, std::unique_ptr<DenseCodec> whole)
    : PowerSgd(std::move(tensors), place, number, spec, std::move(whole)) {}

absl::StatusOr<std::unique_ptr<CpuPowerSgd>> CpuPowerSgd::Create(TensorSet tensors,
                                                                 const CodecPlace& place,
                                                                 uint32_t number, DType dense,
                                                                 const CodecSpec& spec,
                                                                 ParameterStates& states) {
  auto whole = std::make_unique<CastCodec>(tensors, place, number + 2, dense, /*is_direct=*/false);
  std::unique_ptr<CpuPowerSgd> codec(
      new CpuPowerSgd(std::move(tensors), place, number, spec, std::move(whole)));
  THALWEG_ASSIGN_OR_RETURN(const bool has_matrices, codec->TakeTensors(states));
  if (!has_matrices) return nullptr;
  codec->Allocate(codec->p_, *codec->first_);
  codec->Allocate(codec->q_, *codec->second_);
  codec->MakeTasks();
  return codec;
}

void CpuPowerSgd::Allocate(Factors& factors, const Part& part) const {
  factors.sent.resize(part.Elems());
  factors.mean.resize(part.Elems());
  if (spec_.wire != DType::kFloat32) factors.encoded.resize(part.Elems() * SizeOf(spec_.wire));
}

void CpuPowerSgd::MakeTasks() {
  for (uint32_t i = 0; i < plains_.size(); ++i) {
    for (uint64_t begin = 0; begin < plains_[i].elems; begin += kTaskElems) {
      row_tasks_.push_back({i, false, begin, std::min(plains_[i].elems, begin + kTaskElems)});
    }
  }
  for (uint32_t i = 0; i < matrices_.size(); ++i) {
    const Matrix& m = matrices_[i];
    const uint64_t rows = std::max<uint64_t>(1, kTaskElems / m.columns);
    for (uint64_t begin = 0; begin < m.rows; begin += rows) {
      row_tasks_.push_back({i, true, begin, std::min(m.rows, begin + rows)});
    }
    for (uint64_t begin = 0; begin < m.columns; begin += kTaskColumns) {
      column_tasks_.push_back({i, true, begin, std::min(m.columns, begin + kTaskColumns)});
    }
  }
  // The order is the bucket's, in which gradients arrive.
  std::sort(row_tasks_.begin(), row_tasks_.end(),
            [this](const Task& a, const Task& b) { return Range(a).first < Range(b).first; });
}

absl::Status CpuPowerSgd::Project(FoldPool& pool, Gradient& gradient) {
  THALWEG_RETURN_IF_ERROR(PrepareFactors(pool));
  return pool.Run(static_cast<uint32_t>(row_tasks_.size()),
                  [&](uint32_t i) { return ProjectRows(row_tasks_[i], gradient); });
}

absl::StatusOr<std::span<const std::byte>> CpuPowerSgd::EncodeFactors(const Part& part,
                                                                      uint32_t chunk,
                                                                      Gradient& /*gradient*/) {
  Factors& factors = Of(part);
  const uint64_t begin = part.plan.Begin(chunk);
  const uint64_t elems = part.plan.Elems(chunk);
  const float* values = factors.sent.data() + begin;
  if (factors.encoded.empty()) return std::as_bytes(std::span(values, elems));
  const size_t size = SizeOf(spec_.wire);
  std::byte* out = factors.encoded.data() + begin * size;
  FoldShares({values}, DType::kFloat32, spec_.wire, elems, out);
  return std::span<const std::byte>(out, elems * size);
}

absl::Status CpuPowerSgd::DecodeFactors(const Part& part, const RoundResult& received) {
  return DecodePayload(received.payload, spec_.wire, DType::kFloat32, received.elems,
                       Of(part).mean.data() + part.plan.Begin(received.id.chunk));
}

absl::Status CpuPowerSgd::ProjectRows(const Task& task, Gradient& gradient) {
  const auto [begin, elems] = Range(task);
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(begin + elems));
  std::vector<float> tile;
  const float* g = gradient.Read(begin, elems, tile);
  if (!task.is_matrix) {
    float* out = p_.sent.data() + plains_[task.item].sent_offset + task.begin;
    std::memcpy(out, g, elems * sizeof(float));
    return absl::OkStatus();
  }
  const Matrix& m = matrices_[task.item];
  const std::span<float> x = NextRows(task);
  std::span<const float> error =
      std::span<const float>(m.state->residual).subspan(task.begin * m.columns, elems);
  if (!spec_.feedback) {
    std::fill(x.begin(), x.end(), 0.0f);
    error = x;
  }
  AddErrorAndProject(Shape(task), {g, elems}, error, x, m.state->factor, P(p_.sent, task));
  return absl::OkStatus();
}

bool CpuPowerSgd::IsPFinite() const {
  return std::all_of(matrices_.begin(), matrices_.end(), [this](const Matrix& m) {
    return AreFinite(std::span(p_.mean).subspan(m.p_offset, m.rows * m.rank));
  });
}

absl::StatusOr<bool> CpuPowerSgd::ProjectTransposed(FoldPool& pool) {
  const bool is_finite = IsPFinite();
  if (!is_finite && !decides_late_) return false;
  THALWEG_RETURN_IF_ERROR(
      pool.Run(static_cast<uint32_t>(matrices_.size()), [this](uint32_t i) -> absl::Status {
        const Matrix& m = matrices_[i];
        OrthogonaliseColumns(std::span(p_.mean).subspan(m.p_offset, m.rows * m.rank), m.rank,
                             spec_.epsilon);
        return absl::OkStatus();
      }));
  THALWEG_RETURN_IF_ERROR(
      pool.Run(static_cast<uint32_t>(column_tasks_.size()), [this](uint32_t i) -> absl::Status {
        const Task& task = column_tasks_[i];
        const Matrix& m = matrices_[task.item];
        thalweg::ProjectTransposed({m.rows, m.columns, m.rank}, NextResidual(m.tensor),
                                   std::span(p_.mean).subspan(m.p_offset, m.rows * m.rank),
                                   task.begin, task.end,
                                   std::span(q_.sent).subspan(m.q_offset, m.QElems()));
        return absl::OkStatus();
      }));
  return is_finite;
}

uint64_t CpuPowerSgd::ReconstructRows(const Task& task, CompressionLoss* loss) {
  const DType dtype = tensors_.layout().dtype;
  const auto [begin, elems] = Range(task);
  std::byte* out = place_.result + begin * SizeOf(dtype);
  std::vector<float> tile;
  const float* values = p_.mean.data();
  uint64_t nonfinite = 0;
  if (task.is_matrix) {
    const Matrix& m = matrices_[task.item];
    const bool in_place = dtype == DType::kFloat32;
    if (!in_place) tile.resize(elems);
    float* decoded = in_place ? reinterpret_cast<float*>(out) : tile.data();
    nonfinite = thalweg::Reconstruct(Shape(task), P(p_.mean, task),
                                     std::span(q_.mean).subspan(m.q_offset, m.QElems()),
                                     NextRows(task), {decoded, elems});
    if (loss != nullptr) *loss = LossOf({decoded, elems}, NextRows(task));
    if (in_place) return nonfinite;
    return FoldShares({decoded}, DType::kFloat32, dtype, elems, out);
  }
  values += plains_[task.item].sent_offset + task.begin;
  // Shards have counted those that are not finite before they are narrowed.
  const auto counted = static_cast<uint64_t>(
      std::count_if(values, values + elems, [](float value) { return !std::isfinite(value); }));
  return FoldShares({values}, DType::kFloat32, dtype, elems, out) - counted;
}

absl::StatusOr<uint64_t> CpuPowerSgd::Reconstruct(FoldPool& pool) {
  std::atomic<uint64_t> nonfinite{0};
  const bool is_sampled = IsSampled();
  std::vector<CompressionLoss> losses(row_tasks_.size());
  THALWEG_RETURN_IF_ERROR(pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) {
    nonfinite += ReconstructRows(row_tasks_[i], is_sampled ? &losses[i] : nullptr);
    return absl::OkStatus();
  }));
  if (is_sampled) loss_ = {};
  // in one order, whichever threads computed them
  for (const CompressionLoss& loss : losses) loss_ += loss;
  for (const Matrix& m : matrices_) {
    KeepFactor(m, std::span(q_.mean).subspan(m.q_offset, m.QElems()));
  }
  return nonfinite.load();
}

absl::Status CpuPowerSgd::GiveUp(FoldPool& pool, Gradient& gradient) {
  return pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) -> absl::Status {
    const Task& task = row_tasks_[i];
    if (!task.is_matrix) return absl::OkStatus();
    const auto [begin, elems] = Range(task);
    std::vector<float> tile;
    RestoreError({gradient.Read(begin, elems, tile), elems}, NextRows(task));
    return absl::OkStatus();
  });
}

FactorShape CpuPowerSgd::Shape(const Task& task) const {
  const Matrix& m = matrices_[task.item];
  return {task.end - task.begin, m.columns, m.rank};
}

std::span<float> CpuPowerSgd::NextRows(const Task& task) const {
  const Matrix& m = matrices_[task.item];
  return NextResidual(m.tensor).subspan(task.begin * m.columns,
                                        (task.end - task.begin) * m.columns);
}

std::span<float> CpuPowerSgd::P(std::vector<float>& first, const Task& task) const {
  const Matrix& m = matrices_[task.item];
  return std::span(first).subspan(m.p_offset + task.begin * m.rank,
                                  (task.end - task.begin) * m.rank);
}

std::pair<uint64_t, uint64_t> CpuPowerSgd::Range(const Task& task) const {
  if (!task.is_matrix) return {plains_[task.item].offset + task.begin, task.end - task.begin};
  const Matrix& m = matrices_[task.item];
  return {m.offset + task.begin * m.columns, (task.end - task.begin) * m.columns};
}

}  // namespace thalweg
