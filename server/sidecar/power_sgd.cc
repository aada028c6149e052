#include "server/sidecar/power_sgd.h"

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

std::byte* Bytes(std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); }

}  // namespace

PowerSgd::PowerSgd(const Part& dense, const CodecSpec& spec) : dense_(dense), spec_(spec) {}

absl::StatusOr<std::unique_ptr<PowerSgd>> PowerSgd::Create(const Part& dense, const CodecSpec& spec,
                                                           uint64_t chunk_bytes,
                                                           uint32_t num_shards,
                                                           MatrixStates& states) {
  const BucketLayout& layout = dense.bucket.layout;
  // Factors in float32 would cost the digits for which somebody trains in float64.
  std::unique_ptr<PowerSgd> codec;
  if (layout.dtype == DType::kFloat64) return codec;
  codec.reset(new PowerSgd(dense, spec));
  uint64_t offset = 0;
  for (const TensorSpec& tensor : layout.tensors) {
    THALWEG_RETURN_IF_ERROR(codec->Add(tensor, offset, states));
    offset += tensor.Elems();
  }
  if (codec->matrices_.empty()) return std::unique_ptr<PowerSgd>();
  codec->MakeParts(chunk_bytes, num_shards);
  codec->MakeTasks();
  return codec;
}

absl::Status PowerSgd::Add(const TensorSpec& tensor, uint64_t offset, MatrixStates& states) {
  const uint64_t elems = tensor.Elems();
  if (elems == 0) return absl::OkStatus();
  const uint64_t rows = tensor.shape.empty() ? 1 : static_cast<uint64_t>(tensor.shape[0]);
  const uint64_t columns = elems / rows;
  if (!Compresses(rows, columns, spec_.rank, spec_.min_rate)) {
    plains_.push_back({offset, elems, 0});
    return absl::OkStatus();
  }
  std::shared_ptr<MatrixState>& state = states[tensor.name];
  const auto rank = static_cast<uint32_t>(FactorRank(rows, columns, spec_.rank));
  if (state == nullptr) {
    state = std::make_shared<MatrixState>();
    state->residual.resize(elems);
  }
  if (state->residual.size() != elems) {
    return absl::InvalidArgumentError(absl::StrCat("parameter '", tensor.name, "' has ", elems,
                                                   " elements, its codec state ",
                                                   state->residual.size()));
  }
  matrices_.push_back({offset, rows, columns, rank, 0, 0, HashOf(tensor.name), state});
  return absl::OkStatus();
}

void PowerSgd::MakeParts(uint64_t chunk_bytes, uint32_t num_shards) {
  const BucketLayout& layout = dense_.bucket.layout;
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
  uint64_t offset = 0;
  size_t next = 0;
  BucketLayout factors{DType::kFloat32, {}};
  for (const TensorSpec& tensor : layout.tensors) {
    const bool is_matrix = next < matrices_.size() && matrices_[next].offset == offset;
    offset += tensor.Elems();
    if (!is_matrix) {
      if (tensor.Elems() > 0) first.tensors.push_back(tensor);
      continue;
    }
    const Matrix& m = matrices_[next++];
    const auto rank = static_cast<int64_t>(m.rank);
    factors.tensors.push_back({tensor.name + "/P", {static_cast<int64_t>(m.rows), rank}});
    second.tensors.push_back({tensor.name + "/Q", {rank, static_cast<int64_t>(m.columns)}});
  }
  first.tensors.insert(first.tensors.end(), factors.tensors.begin(), factors.tensors.end());

  const DType wire = spec_.wire;
  BucketId id = dense_.bucket.id;
  const auto make = [&](uint32_t number, const BucketLayout& part_layout, WireFormat part_wire) {
    id.part = number;
    return std::make_unique<Part>(id, part_layout, part_wire, chunk_bytes, num_shards);
  };
  first_ = make(1, first, FormatOf(wire));
  second_ = make(2, second, FormatOf(wire));
  whole_ = make(3, layout, dense_.bucket.wire);

  const auto prepare = [&](Part& part, std::vector<float>& sent, std::vector<float>& mean,
                           std::vector<std::byte>& encoded) {
    sent.resize(part.Elems());
    mean.resize(part.Elems());
    if (wire != DType::kFloat32) encoded.resize(part.WireBytes());
    part.send = encoded.empty() ? Bytes(sent) : encoded.data();
    part.receive = Bytes(mean);
  };
  prepare(*first_, first_sent_, first_mean_, first_encoded_);
  prepare(*second_, second_sent_, second_mean_, second_encoded_);
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

bool PowerSgd::IsSampled() const {
  return second_->round % kSampleEvery == 1;  // rounds of a part count from 1
}

Part* PowerSgd::FindPart(uint32_t number) {
  switch (number) {
    case 1:
      return first_.get();
    case 2:
      return second_.get();
    case 3:
      return whole_.get();
    default:
      return nullptr;
  }
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

absl::Status PowerSgd::Project(FoldPool& pool, Device& device, GradientSource& gradient) {
  THALWEG_RETURN_IF_ERROR(PrepareFactors(pool));
  THALWEG_RETURN_IF_ERROR(pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) {
    return ProjectRows(row_tasks_[i], gradient);
  }));
  return EncodePart(pool, device, *first_, first_sent_, first_encoded_);
}

absl::Status PowerSgd::ProjectRows(const Task& task, GradientSource& gradient) {
  const auto [begin, elems] = Range(task);
  THALWEG_RETURN_IF_ERROR(gradient.WaitFor(begin + elems));
  std::vector<float> tile;
  const float* g = gradient.Read(begin, elems, tile);
  if (!task.is_matrix) {
    float* out = first_sent_.data() + plains_[task.item].sent_offset + task.begin;
    std::memcpy(out, g, elems * sizeof(float));
    return absl::OkStatus();
  }
  const Matrix& m = matrices_[task.item];
  const std::span<float> error = m.Rows(task);
  if (!spec_.feedback) std::fill(error.begin(), error.end(), 0.0f);
  AddErrorAndProject(m.Shape(task), {g, elems}, error, m.state->factor, P(first_sent_, task));
  return absl::OkStatus();
}

bool PowerSgd::IsFinite() const {
  return std::all_of(matrices_.begin(), matrices_.end(), [this](const Matrix& m) {
    return AllFinite(first_mean_.data() + m.p_offset, m.rows * m.rank);
  });
}

absl::Status PowerSgd::ProjectTransposed(FoldPool& pool, Device& device) {
  THALWEG_RETURN_IF_ERROR(
      pool.Run(static_cast<uint32_t>(matrices_.size()), [this](uint32_t i) -> absl::Status {
        const Matrix& m = matrices_[i];
        OrthogonaliseColumns(std::span(first_mean_).subspan(m.p_offset, m.rows * m.rank), m.rank,
                             spec_.epsilon);
        return absl::OkStatus();
      }));
  THALWEG_RETURN_IF_ERROR(
      pool.Run(static_cast<uint32_t>(column_tasks_.size()), [this](uint32_t i) -> absl::Status {
        const Task& task = column_tasks_[i];
        const Matrix& m = matrices_[task.item];
        thalweg::ProjectTransposed({m.rows, m.columns, m.rank}, m.state->residual,
                                   std::span(first_mean_).subspan(m.p_offset, m.rows * m.rank),
                                   task.begin, task.end,
                                   std::span(second_sent_).subspan(m.q_offset, m.rank * m.columns));
        return absl::OkStatus();
      }));
  return EncodePart(pool, device, *second_, second_sent_, second_encoded_);
}

absl::StatusOr<uint64_t> PowerSgd::Reconstruct(FoldPool& pool, Device& device, std::byte* result) {
  const DType dtype = dense_.bucket.layout.dtype;
  std::atomic<uint64_t> nonfinite{0};
  const bool is_sampled = IsSampled();
  std::vector<CompressionLoss> losses(is_sampled ? row_tasks_.size() : 0);
  THALWEG_RETURN_IF_ERROR(
      pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) -> absl::Status {
        const Task& task = row_tasks_[i];
        const auto [begin, elems] = Range(task);
        std::byte* out = result + begin * SizeOf(dtype);
        std::vector<float> tile;
        const float* values = first_mean_.data();
        if (task.is_matrix) {
          const Matrix& m = matrices_[task.item];
          const bool in_place = dtype == DType::kFloat32;
          if (!in_place) tile.resize(elems);
          float* decoded = in_place ? reinterpret_cast<float*>(out) : tile.data();
          nonfinite +=
              thalweg::Reconstruct(m.Shape(task), P(first_mean_, task),
                                   std::span(second_mean_).subspan(m.q_offset, m.rank * m.columns),
                                   m.Rows(task), {decoded, elems});
          if (is_sampled) losses[i] = LossOf({decoded, elems}, m.Rows(task));
          values = decoded;
          if (in_place) return absl::OkStatus();
        } else {
          values += plains_[task.item].sent_offset + task.begin;
        }
        const void* share = values;
        device.Encode({&share, 1}, DType::kFloat32, dtype, elems, out);
        return absl::OkStatus();
      }));
  if (is_sampled) loss_ = {};
  for (const CompressionLoss& loss : losses) {  // in one order, whoever computed them
    loss_.residual += loss.residual;
    loss_.whole += loss.whole;
  }
  for (const Matrix& m : matrices_) {
    const auto begin = second_mean_.begin() + static_cast<std::ptrdiff_t>(m.q_offset);
    m.state->factor.assign(begin, begin + static_cast<std::ptrdiff_t>(m.rank * m.columns));
    // Nothing that is not finite goes into the next round.
    if (!AllFinite(m.state->factor.data(), m.state->factor.size())) m.state->factor.clear();
  }
  return nonfinite.load() + first_->nonfinite_elems;
}

absl::Status PowerSgd::GiveUp(FoldPool& pool, GradientSource& gradient) {
  return pool.Run(static_cast<uint32_t>(row_tasks_.size()), [&](uint32_t i) -> absl::Status {
    const Task& task = row_tasks_[i];
    if (!task.is_matrix) return absl::OkStatus();
    const auto [begin, elems] = Range(task);
    std::vector<float> tile;
    RestoreError({gradient.Read(begin, elems, tile), elems}, matrices_[task.item].Rows(task));
    return absl::OkStatus();
  });
}

absl::Status PowerSgd::EncodePart(FoldPool& pool, Device& device, const Part& part,
                                  const std::vector<float>& values,
                                  std::vector<std::byte>& encoded) {
  if (encoded.empty()) return absl::OkStatus();
  const DType wire = part.WireType();
  return pool.Run(part.plan.Count(), [&](uint32_t chunk) {
    const uint64_t begin = part.plan.Begin(chunk);
    const void* share = values.data() + begin;
    device.Encode({&share, 1}, DType::kFloat32, wire, part.plan.Elems(chunk),
                  encoded.data() + begin * SizeOf(wire));
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
