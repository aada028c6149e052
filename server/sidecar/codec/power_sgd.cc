#include "server/sidecar/codec/power_sgd.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/hash.h"
#include "core/base/status_macros.h"
#include "kernels/codec/orthogonalise.h"
#include "kernels/codec/powersgd.h"

namespace thalweg {
namespace {

// What one task works on: enough that handing it out costs nothing, little enough that its tile and
// the factors stay in a core's cache.
constexpr uint64_t kTaskElems = 64 << 10;
constexpr uint64_t kTaskColumns = 256;

uint64_t HashOf(const std::string& name) {
  Fnv1a hash;
  hash.Add(name.data(), name.size());
  return hash.hash();
}

bool AllFinite(const float* values, uint64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

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

PowerSgd::PowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number, DType dense,
                   const CodecSpec& spec)
    : BucketCodec(std::move(tensors), place),
      spec_(spec),
      number_(number),
      whole_(tensors_, place, number + 2, dense, /*is_direct=*/false) {}

absl::StatusOr<std::unique_ptr<PowerSgd>> PowerSgd::Create(TensorSet tensors,
                                                           const CodecPlace& place, uint32_t number,
                                                           DType dense, const CodecSpec& spec,
                                                           ParameterStates& states) {
  std::unique_ptr<PowerSgd> codec(new PowerSgd(std::move(tensors), place, number, dense, spec));
  for (size_t i = 0; i < codec->tensors_.layout().tensors.size(); ++i) {
    THALWEG_RETURN_IF_ERROR(codec->Add(i, states));
  }
  if (codec->matrices_.empty()) return std::unique_ptr<PowerSgd>();
  codec->MakeParts();
  codec->MakeTasks();
  return codec;
}

absl::Status PowerSgd::Add(size_t index, ParameterStates& states) {
  const TensorSpec& tensor = tensors_.layout().tensors[index];
  const uint64_t offset = tensors_.BucketOffset(index);
  const uint64_t elems = tensor.Elems();
  if (elems == 0) return absl::OkStatus();
  const uint64_t rows = tensor.shape.empty() ? 1 : static_cast<uint64_t>(tensor.shape[0]);
  const uint64_t columns = elems / rows;
  if (!Compresses(rows, columns, spec_.rank, spec_.min_rate)) {
    plains_.push_back({offset, elems, 0});
    return absl::OkStatus();
  }
  THALWEG_ASSIGN_OR_RETURN(auto state, StateOf(states, tensor));
  state->residual.resize(elems);
  const auto rank = static_cast<uint32_t>(FactorRank(rows, columns, spec_.rank));
  matrices_.push_back({offset, rows, columns, rank, 0, 0, HashOf(tensor.name), std::move(state)});
  return absl::OkStatus();
}

void PowerSgd::MakeParts() {
  BucketLayout first{DType::kFloat32, {}};
  BucketLayout second{DType::kFloat32, {}};
  uint64_t first_elems = 0;
  for (Plain& plain : plains_) {
    plain.sent_offset = first_elems;
    first_elems += plain.elems;
  }
  uint64_t second_elems = 0;
  for (Matrix& matrix : matrices_) {
    matrix.p_offset = first_elems;
    matrix.q_offset = second_elems;
    first_elems += matrix.rows * matrix.rank;
    second_elems += matrix.columns * matrix.rank;
  }
  // Named after the tensors, so that a mismatch between nodes names them too.
  const std::vector<TensorSpec>& tensors = tensors_.layout().tensors;
  size_t next = 0;
  BucketLayout factors{DType::kFloat32, {}};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& tensor = tensors[i];
    if (tensor.Elems() == 0) continue;
    if (next == matrices_.size() || matrices_[next].offset != tensors_.BucketOffset(i)) {
      first.tensors.push_back(tensor);
      continue;
    }
    const Matrix& m = matrices_[next++];
    const auto rank = static_cast<int64_t>(m.rank);
    factors.tensors.push_back({tensor.name + "/P", {static_cast<int64_t>(m.rows), rank}});
    second.tensors.push_back({tensor.name + "/Q", {rank, static_cast<int64_t>(m.columns)}});
  }
  first.tensors.insert(first.tensors.end(), factors.tensors.begin(), factors.tensors.end());

  const auto prepare = [&](Factors& factors_of, uint32_t number, const BucketLayout& layout) {
    factors_of.part = std::make_unique<Part>(MakePart(number, layout, FormatOf(spec_.wire)));
    factors_of.sent.resize(layout.Elems());
    factors_of.mean.resize(layout.Elems());
    if (spec_.wire != DType::kFloat32) {
      factors_of.encoded.resize(layout.Elems() * SizeOf(spec_.wire));
    }
  };
  prepare(first_, number_, first);
  prepare(second_, number_ + 1, second);
}

void PowerSgd::MakeTasks() {
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
  // Gradients arrive in the bucket's order.
  std::sort(row_tasks_.begin(), row_tasks_.end(),
            [this](const Task& a, const Task& b) { return Range(a).first < Range(b).first; });
}

bool PowerSgd::HasStarted() const {
  return std::all_of(matrices_.begin(), matrices_.end(),
                     [this](const Matrix& m) { return m.state->rounds >= spec_.start; });
}

void PowerSgd::CountRound() {
  for (Matrix& m : matrices_) ++m.state->rounds;
}

Part* PowerSgd::FindPart(uint32_t number) {
  if (number == number_) return first_.part.get();
  if (number == number_ + 1) return second_.part.get();
  return whole_.FindPart(number);
}

absl::Status PowerSgd::PrepareFactors(FoldPool& pool) {
  return pool.Run(static_cast<uint32_t>(matrices_.size()), [this](uint32_t i) {
    const Matrix& m = matrices_[i];
    std::vector<float>& factor = m.state->factor;
    const auto seed = [&](size_t column) {
      // All nodes have seen the parameter in as many rounds.
      SeedDirection({spec_.seed, m.name_hash, column, m.state->rounds},
                    std::span(factor).subspan(column * m.columns, m.columns));
    };
    // A factor of another size was loaded, from a run with another rank.
    if (!spec_.warm || factor.size() != m.rank * m.columns) {
      factor.resize(m.rank * m.columns);
      for (uint32_t column = 0; column < m.rank; ++column) seed(column);
    }
    // A direction that died, because the gradient had less than full rank, would stay dead.
    const auto dead = OrthogonaliseRows(factor, m.rank, spec_.epsilon);
    for (const size_t column : dead) seed(column);
    if (!dead.empty()) OrthogonaliseRows(factor, m.rank, spec_.epsilon);
    return absl::OkStatus();
  });
}

absl::StatusOr<Part*> PowerSgd::Begin(FoldPool& pool, Gradient& gradient) {
  step_ = Step::kFirst;
  THALWEG_RETURN_IF_ERROR(PrepareFactors(pool));
  THALWEG_RETURN_IF_ERROR(pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) {
    return ProjectRows(row_tasks_[i], gradient);
  }));
  return first_.part.get();
}

absl::StatusOr<Part*> PowerSgd::Next(FoldPool& pool, Gradient& gradient) {
  switch (step_) {
    case Step::kFirst:
      if (IsFinite()) {
        step_ = Step::kSecond;
        THALWEG_RETURN_IF_ERROR(ProjectTransposed(pool));
        return second_.part.get();
      }
      step_ = Step::kWhole;
      return whole_.Begin(pool, gradient);
    case Step::kSecond:
      THALWEG_RETURN_IF_ERROR(Reconstruct(pool));
      return nullptr;
    case Step::kWhole:
      THALWEG_RETURN_IF_ERROR(GiveUp(pool, gradient));
      return nullptr;
  }
  return absl::InternalError("no such step");
}

absl::StatusOr<std::span<const std::byte>> PowerSgd::Encode(const Part& part, uint32_t chunk,
                                                            Gradient& gradient) {
  if (&part == &whole_.part()) return whole_.Encode(part, chunk, gradient);
  Factors& factors = &part == first_.part.get() ? first_ : second_;
  const uint64_t begin = part.plan.Begin(chunk);
  const uint64_t elems = part.plan.Elems(chunk);
  const float* values = factors.sent.data() + begin;
  if (factors.encoded.empty()) return std::as_bytes(std::span(values, elems));
  const size_t size = SizeOf(spec_.wire);
  std::byte* out = factors.encoded.data() + begin * size;
  const void* share = values;
  place_.device->Encode({&share, 1}, DType::kFloat32, spec_.wire, elems, out);
  return std::span<const std::byte>(out, elems * size);
}

absl::Status PowerSgd::Decode(const Part& part, const RoundResult& received) {
  if (&part == &whole_.part()) return whole_.Decode(part, received);
  Factors& factors = &part == first_.part.get() ? first_ : second_;
  return place_.device->Decode(received.payload, spec_.wire, DType::kFloat32, received.elems,
                               factors.mean.data() + part.plan.Begin(received.id.chunk));
}

absl::Status PowerSgd::ProjectRows(const Task& task, Gradient& gradient) {
  const auto [begin, elems] = Range(task);
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(begin + elems));
  std::vector<float> tile;
  const float* g = gradient.Read(begin, elems, tile);
  if (!task.is_matrix) {
    float* out = first_.sent.data() + plains_[task.item].sent_offset + task.begin;
    std::memcpy(out, g, elems * sizeof(float));
    return absl::OkStatus();
  }
  const Matrix& m = matrices_[task.item];
  const std::span<float> error = m.Rows(task);
  if (!spec_.feedback) std::fill(error.begin(), error.end(), 0.0f);
  AddErrorAndProject(m.Shape(task), {g, elems}, error, m.state->factor, P(first_.sent, task));
  return absl::OkStatus();
}

bool PowerSgd::IsFinite() const {
  return std::all_of(matrices_.begin(), matrices_.end(), [this](const Matrix& m) {
    return AllFinite(first_.mean.data() + m.p_offset, m.rows * m.rank);
  });
}

absl::Status PowerSgd::ProjectTransposed(FoldPool& pool) {
  THALWEG_RETURN_IF_ERROR(
      pool.Run(static_cast<uint32_t>(matrices_.size()), [this](uint32_t i) -> absl::Status {
        const Matrix& m = matrices_[i];
        OrthogonaliseColumns(std::span(first_.mean).subspan(m.p_offset, m.rows * m.rank), m.rank,
                             spec_.epsilon);
        return absl::OkStatus();
      }));
  return pool.Run(static_cast<uint32_t>(column_tasks_.size()), [this](uint32_t i) -> absl::Status {
    const Task& task = column_tasks_[i];
    const Matrix& m = matrices_[task.item];
    thalweg::ProjectTransposed({m.rows, m.columns, m.rank}, m.state->residual,
                               std::span(first_.mean).subspan(m.p_offset, m.rows * m.rank),
                               task.begin, task.end,
                               std::span(second_.sent).subspan(m.q_offset, m.rank * m.columns));
    return absl::OkStatus();
  });
}

uint64_t PowerSgd::ReconstructRows(const Task& task, CompressionLoss* loss) {
  const DType dtype = tensors_.layout().dtype;
  const auto [begin, elems] = Range(task);
  std::byte* out = place_.result + begin * SizeOf(dtype);
  std::vector<float> tile;
  const float* values = first_.mean.data();
  uint64_t nonfinite = 0;
  if (task.is_matrix) {
    const Matrix& m = matrices_[task.item];
    const bool in_place = dtype == DType::kFloat32;
    if (!in_place) tile.resize(elems);
    float* decoded = in_place ? reinterpret_cast<float*>(out) : tile.data();
    nonfinite =
        thalweg::Reconstruct(m.Shape(task), P(first_.mean, task),
                             std::span(second_.mean).subspan(m.q_offset, m.rank * m.columns),
                             m.Rows(task), {decoded, elems});
    if (loss != nullptr) *loss = LossOf({decoded, elems}, m.Rows(task));
    if (in_place) return nonfinite;
    values = decoded;
  } else {
    values += plains_[task.item].sent_offset + task.begin;
  }
  const void* share = values;
  place_.device->Encode({&share, 1}, DType::kFloat32, dtype, elems, out);
  return nonfinite;
}

absl::Status PowerSgd::Reconstruct(FoldPool& pool) {
  std::atomic<uint64_t> nonfinite{0};
  const bool is_sampled = second_.part->round % kSampleEvery == 1;  // rounds count from 1
  std::vector<CompressionLoss> losses(row_tasks_.size());
  THALWEG_RETURN_IF_ERROR(pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) {
    nonfinite += ReconstructRows(row_tasks_[i], is_sampled ? &losses[i] : nullptr);
    return absl::OkStatus();
  }));
  nonfinite_elems_ = nonfinite.load() + first_.part->nonfinite_elems;
  if (is_sampled) loss_ = {};
  for (const CompressionLoss& loss : losses) loss_ += loss;  // in one order, whoever computed them
  for (const Matrix& m : matrices_) {
    const auto begin = second_.mean.begin() + static_cast<std::ptrdiff_t>(m.q_offset);
    m.state->factor.assign(begin, begin + static_cast<std::ptrdiff_t>(m.rank * m.columns));
    // Nothing that is not finite goes into the next round.
    if (!AllFinite(m.state->factor.data(), m.state->factor.size())) m.state->factor.clear();
  }
  return absl::OkStatus();
}

absl::Status PowerSgd::GiveUp(FoldPool& pool, Gradient& gradient) {
  nonfinite_elems_ = whole_.nonfinite_elems();
  return pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) -> absl::Status {
    const Task& task = row_tasks_[i];
    if (!task.is_matrix) return absl::OkStatus();
    const auto [begin, elems] = Range(task);
    std::vector<float> tile;
    RestoreError({gradient.Read(begin, elems, tile), elems}, matrices_[task.item].Rows(task));
    return absl::OkStatus();
  });
}

FactorShape PowerSgd::Matrix::Shape(const Task& task) const {
  return {task.end - task.begin, columns, rank};
}

std::span<float> PowerSgd::Matrix::Rows(const Task& task) const {
  return std::span(state->residual)
      .subspan(task.begin * columns, (task.end - task.begin) * columns);
}

std::span<float> PowerSgd::P(std::vector<float>& first, const Task& task) const {
  const Matrix& m = matrices_[task.item];
  return std::span(first).subspan(m.p_offset + task.begin * m.rank,
                                  (task.end - task.begin) * m.rank);
}

std::pair<uint64_t, uint64_t> PowerSgd::Range(const Task& task) const {
  if (!task.is_matrix) return {plains_[task.item].offset + task.begin, task.end - task.begin};
  const Matrix& m = matrices_[task.item];
  return {m.offset + task.begin * m.columns, (task.end - task.begin) * m.columns};
}

}  // namespace thalweg
