#include "server/sidecar/codec/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/hash.h"
#include "core/base/status_macros.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "kernels/codec/powersgd/powersgd.h"

namespace thalweg {
namespace {

uint64_t HashOf(const std::string& name) {
  Fnv1a hash;
  hash.Add(name.data(), name.size());
  return hash.hash();
}

// Returns the type that a bucket's factors and plain tensors travel in. One 16-bit type holds less
// than the other: finite gradients could become infinite in it, or zero.
DType WireOf(DType wire, DType bucket) {
  const bool is_other = wire != bucket && SizeOf(wire) == SizeOf(bucket);
  return is_other ? DType::kFloat32 : wire;
}

CodecSpec WithWire(CodecSpec spec, DType wire) {
  spec.wire = wire;
  return spec;
}

}  // namespace

PowerSgd::PowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number,
                   const CodecSpec& spec, std::unique_ptr<DenseCodec> whole)
    : BucketCodec(std::move(tensors), place),
      spec_(WithWire(spec, WireOf(spec.wire, tensors_.layout().dtype))),
      decides_late_(spec.wire == DType::kFloat16),
      number_(number),
      whole_(std::move(whole)) {}

absl::StatusOr<bool> PowerSgd::TakeTensors(ParameterStates& states) {
  uint64_t set_offset = 0;
  states_.resize(tensors_.layout().tensors.size());
  for (size_t i = 0; i < tensors_.layout().tensors.size(); ++i) {
    THALWEG_RETURN_IF_ERROR(Add(i, set_offset, states));
    set_offset += tensors_.layout().tensors[i].Elems();
  }
  if (matrices_.empty()) return false;
  MakeParts();
  return true;
}

absl::Status PowerSgd::Add(size_t index, uint64_t set_offset, ParameterStates& states) {
  const TensorSpec& tensor = tensors_.layout().tensors[index];
  const uint64_t offset = tensors_.BucketOffset(index);
  const uint64_t elems = tensor.Elems();
  if (elems == 0) return absl::OkStatus();
  const uint64_t rows = tensor.shape.empty() ? 1 : static_cast<uint64_t>(tensor.shape[0]);
  const uint64_t columns = elems / rows;
  if (!Compresses(rows, columns, spec_.rank, spec_.min_rate)) {
    plains_.push_back({offset, set_offset, elems, 0});
    return absl::OkStatus();
  }
  THALWEG_ASSIGN_OR_RETURN(auto state, StateOf(states, tensor));
  state->residual.Resize(elems);
  states_[index] = state;
  const auto rank = static_cast<uint32_t>(FactorRank(rows, columns, spec_.rank));
  matrices_.push_back({index, offset, set_offset, rows, columns, rank, 0, 0, HashOf(tensor.name),
                       std::move(state)});
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

  // The bytes are split in proportion to what each part sends, so that every shard sees the same
  // ratio.
  const double share =
      static_cast<double>(first_elems) / static_cast<double>(first_elems + second_elems);
  const auto first_raw = static_cast<uint64_t>(share * static_cast<double>(tensors_.Bytes()));
  const WireFormat wire = FormatOf(spec_.wire);
  first_ = std::make_unique<Part>(MakePart(number_, first, wire, first_raw));
  second_ =
      std::make_unique<Part>(MakePart(number_ + 1, second, wire, tensors_.Bytes() - first_raw));
}

bool PowerSgd::HasStarted() const {
  return std::all_of(matrices_.begin(), matrices_.end(),
                     [this](const Matrix& m) { return m.state->rounds >= spec_.start; });
}

void PowerSgd::CountRound() {
  for (Matrix& m : matrices_) ++m.state->rounds;
}

Part* PowerSgd::FindPart(uint32_t number) {
  if (number == number_) return first_.get();
  if (number == number_ + 1) return second_.get();
  return whole_->FindPart(number);
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

bool PowerSgd::AreFinite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}

void PowerSgd::KeepFactor(const Matrix& matrix, std::span<const float> factor) {
  if (AreFinite(factor)) {
    matrix.state->factor.assign(factor.begin(), factor.end());
  } else {
    matrix.state->factor.clear();
  }
}

absl::StatusOr<Part*> PowerSgd::Begin(FoldPool& pool, Gradient& gradient) {
  step_ = Step::kFirst;
  THALWEG_RETURN_IF_ERROR(Project(pool, gradient));
  return first_.get();
}

bool PowerSgd::MayFollow(const Part& part) const {
  return &part == first_.get() || (&part == second_.get() && decides_late_);
}

absl::StatusOr<Part*> PowerSgd::Next(FoldPool& pool, Gradient& gradient) {
  switch (step_) {
    case Step::kFirst: {
      THALWEG_ASSIGN_OR_RETURN(is_p_finite_, ProjectTransposed(pool));
      step_ = is_p_finite_ || decides_late_ ? Step::kSecond : Step::kWhole;
      if (step_ == Step::kSecond) return second_.get();
      return whole_->Begin(pool, gradient);
    }
    case Step::kSecond: {
      if (decides_late_) {
        bool is_finite = is_p_finite_;
        if (is_finite) {
          THALWEG_ASSIGN_OR_RETURN(is_finite, IsQFinite());
        }
        if (!is_finite) {
          step_ = Step::kWhole;
          return whole_->Begin(pool, gradient);
        }
      }
      THALWEG_ASSIGN_OR_RETURN(const uint64_t nonfinite, Reconstruct(pool));
      nonfinite_elems_ = nonfinite + first_->nonfinite_elems;
      return nullptr;
    }
    case Step::kWhole:
      nonfinite_elems_ = whole_->nonfinite_elems();
      THALWEG_RETURN_IF_ERROR(GiveUp(pool, gradient));
      return nullptr;
  }
  return absl::InternalError("no such step");
}

absl::StatusOr<std::span<const std::byte>> PowerSgd::Encode(const Part& part, uint32_t chunk,
                                                            Gradient& gradient) {
  if (&part == &whole_->part()) return whole_->Encode(part, chunk, gradient);
  return EncodeFactors(part, chunk, gradient);
}

absl::Status PowerSgd::Decode(const Part& part, const RoundResult& received) {
  if (&part == &whole_->part()) return whole_->Decode(part, received);
  return DecodeFactors(part, received);
}

}  // namespace thalweg
