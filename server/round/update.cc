#include "server/round/update.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"
#include "kernels/codec/dense.h"
#include "kernels/codec/lossy.h"
#include "kernels/optim/factors_scalar.h"
#include "kernels/optim/optim.h"

namespace thalweg {
namespace {

absl::Status Decode(const RoundResult& mean, float* out) {
  if (!IsDense(mean.wire)) {
    return DecodeLossy(mean.payload, mean.wire, DType::kFloat32, mean.elems, out);
  }
  return DecodePayload(mean.payload, DTypeOf(mean.wire), DType::kFloat32, mean.elems, out);
}

// Returns what the mean is multiplied by, in a group with these settings.
double GradFactor(OptimSettings& settings, const UpdateStep& step, double norm_epsilon) {
  settings.max_grad_norm = step.max_grad_norm;
  settings.norm_epsilon = norm_epsilon;
  return GradFactorOf(settings, 1 / step.grad_scale, step.grad_squares);
}

// Returns the settings that Adam and LAMB have in common.
template <typename Settings>
Settings MomentSettingsOf(const UpdateRule& rule, const GroupStep& group) {
  Settings settings;
  settings.lr = group.lr;
  settings.weight_decay = group.weight_decay;
  settings.maximize = rule.maximize;
  settings.beta1 = group.beta1;
  settings.beta2 = group.beta2;
  settings.epsilon = group.eps;
  settings.decoupled = rule.decoupled;
  return settings;
}

AdamFactors AdamFactorsOf(const UpdateRule& rule, const UpdateStep& step, const GroupStep& group,
                          uint64_t number) {
  auto settings = MomentSettingsOf<AdamSettings>(rule, group);
  return FactorsOf(settings, BiasCorrectionsAt(settings, static_cast<double>(number)),
                   GradFactor(settings, step, kTorchNormEpsilon));
}

LambFactors LambFactorsOf(const UpdateRule& rule, const UpdateStep& step, const GroupStep& group,
                          uint64_t number) {
  auto settings = MomentSettingsOf<LambSettings>(rule, group);
  return FactorsOf(settings, BiasCorrectionsAt(settings, static_cast<double>(number)),
                   GradFactor(settings, step, /*norm_epsilon=*/0));
}

SgdFactors SgdFactorsOf(const UpdateRule& rule, const UpdateStep& step, const GroupStep& group,
                        bool begins) {
  SgdSettings settings;
  settings.lr = group.lr;
  settings.weight_decay = group.weight_decay;
  settings.maximize = rule.maximize;
  settings.momentum = group.momentum;
  settings.dampening = group.dampening;
  settings.nesterov = rule.nesterov;
  return FactorsOf(settings, begins, GradFactor(settings, step, kTorchNormEpsilon));
}

// What a step reads and writes: weights, the mean, and where the new weights are sent from.
struct Arrays {
  Weights& weights;
  const float* mean;         // null in LAMB's step, which has it in the moments
  std::byte* out = nullptr;  // null: nothing is sent
  DType out_type = DType::kFloat32;
};

template <typename Tensor>
std::pair<std::vector<Tensor>, FlatIndex> TensorsOf(const Arrays& arrays, const UpdateRule& rule,
                                                    std::span<const UpdatePiece> pieces,
                                                    const UpdateStep& step, auto factors_of) {
  std::vector<Tensor> tensors;
  FlatIndex index;
  for (const UpdatePiece& piece : pieces) {
    const uint64_t at = piece.elems.begin;
    const GroupStep& group = step.groups[piece.group];
    Tensor tensor;
    tensor.elems = piece.elems.end - at;
    tensor.param = arrays.weights.params.data() + at;
    if (arrays.mean != nullptr) tensor.grad = arrays.mean + at;
    for (uint32_t i = 0; i < MomentsOf(rule, group); ++i) {
      arrays.weights.moments[i].resize(arrays.weights.params.size());
      tensor.states[i] = arrays.weights.moments[i].data() + at;
    }
    if (arrays.out != nullptr) tensor.copy = arrays.out + at * SizeOf(arrays.out_type);
    tensor.copy_type = arrays.out_type;
    tensor.factors = factors_of(rule, step, group, arrays.weights.steps);
    if constexpr (requires { tensor.rate; }) {
      tensor.rate = static_cast<float>(static_cast<float>(group.lr) * group.trust_ratio);
    }
    index.Add(tensor.elems, StepBytes(tensor));
    tensors.push_back(tensor);
  }
  return {std::move(tensors), std::move(index)};
}

void Step(const Arrays& arrays, const UpdateRule& rule, std::span<const UpdatePiece> pieces,
          const UpdateStep& step) {
  if (rule.optimizer == Optimizer::kAdam) {
    const auto [tensors, index] = TensorsOf<AdamTensor>(arrays, rule, pieces, step, AdamFactorsOf);
    RunAdam(tensors, index, 0, index.Size());
  } else if (rule.optimizer == Optimizer::kLamb) {
    const auto [tensors, index] = TensorsOf<LambTensor>(arrays, rule, pieces, step, LambFactorsOf);
    RunLambStep(tensors, index, 0, index.Size());
  } else {
    // As in torch, the first step with a momentum is the whole gradient's, whenever that is.
    const auto factors_of = [begins = arrays.weights.moments[0].empty()](
                                const UpdateRule& of, const UpdateStep& at, const GroupStep& group,
                                uint64_t) { return SgdFactorsOf(of, at, group, begins); };
    const auto [tensors, index] = TensorsOf<SgdTensor>(arrays, rule, pieces, step, factors_of);
    RunSgd(tensors, index, 0, index.Size());
  }
}

// Returns the result of that round with `count` sums in the place of its values.
RoundResult WithSums(const RoundResult& round, const std::shared_ptr<double[]>& sums,
                     uint64_t count) {
  RoundResult result = round;
  result.wire = WireFormat::kFloat64;
  result.elems = count;
  result.payload =
      Payload({reinterpret_cast<const std::byte*>(sums.get()), count * sizeof(double)}, sums);
  return result;
}

absl::Status NoWeights(const RoundResult& round) {
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(round.id), ": the shard has no weights to update"));
}

absl::Status NothingWaits(const RoundResult& round) {
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(round.id), " pulls, but nothing has been pushed since the last one"));
}

// Does a round that measures.
absl::StatusOr<RoundResult> Measure(const RoundResult& round, const UpdateRule& rule,
                                    std::span<const UpdatePiece> pieces, const UpdateStep& step,
                                    ChunkState& state) {
  std::vector<float> gradient;
  MutexLock lock(state.mutex);
  gradient.swap(state.mean);
  if (gradient.size() != round.elems) return NothingWaits(round);
  Weights& weights = state.WeightsToChange();
  if (weights.params.size() != round.elems) return NoWeights(round);
  ++weights.steps;
  const auto [tensors, index] =
      TensorsOf<LambTensor>({weights, gradient.data()}, rule, pieces, step, LambFactorsOf);
  const uint64_t granules = index.Granules();
  const auto sums = std::make_shared_for_overwrite<double[]>(2 * granules);
  RunLambMoments(tensors, index, 0, index.Size(), sums.get(), sums.get() + granules);
  state.is_measured = true;
  return WithSums(round, sums, 2 * granules);
}

}  // namespace

std::vector<std::vector<UpdatePiece>> PiecesOf(const BucketLayout& layout, const UpdateRule& rule,
                                               const ChunkPlan& plan) {
  std::vector<std::vector<UpdatePiece>> pieces(plan.Count());
  uint32_t chunk = 0;
  uint64_t at = 0;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    for (const uint64_t last = at + layout.tensors[i].Elems(); at < last;) {
      while (plan.Begin(chunk + 1) <= at) ++chunk;
      const uint64_t begin = plan.Begin(chunk);
      const uint64_t end = std::min(last, plan.Begin(chunk + 1));
      pieces[chunk].push_back({{at - begin, end - begin}, rule.groups[i]});
      at = end;
    }
  }
  return pieces;
}

absl::StatusOr<RoundResult> KeepMean(const RoundResult& mean, std::span<const UpdatePiece> pieces,
                                     ChunkState& state) {
  static_assert(kUpdateGranule == kGranule);
  std::vector<float> gradient(mean.elems);
  THALWEG_RETURN_IF_ERROR(Decode(mean, gradient.data()));
  std::vector<OptimTensor> tensors;
  FlatIndex index;
  for (const UpdatePiece& piece : pieces) {
    OptimTensor tensor;
    tensor.elems = piece.elems.end - piece.elems.begin;
    tensor.grad = gradient.data() + piece.elems.begin;
    index.Add(tensor.elems, sizeof(float));
    tensors.push_back(tensor);
  }
  const uint64_t granules = index.Granules();
  const auto squares = std::make_shared_for_overwrite<double[]>(granules);
  RunGradSquares(tensors, index, 0, index.Size(), squares.get());
  {
    MutexLock lock(state.mutex);
    state.mean.swap(gradient);
    state.is_measured = false;
  }
  return WithSums(mean, squares, granules);
}

namespace {

// Returns the settings for a gradient of this staleness.
UpdateStep Slowed(UpdateStep step, uint64_t staleness) {
  for (GroupStep& group : step.groups) {
    group.lr /= static_cast<double>(std::max<uint64_t>(staleness, 1));
  }
  return step;
}

// A WeightsBuffer is where weights are sent from.
struct WeightsBuffer {
  WeightsBuffer(const UpdateRule& rule, uint64_t elems)
      : type(rule.sends_differences() ? DType::kFloat32 : DTypeOf(rule.down)),
        size(elems * SizeOf(type)),
        bytes(std::make_shared_for_overwrite<std::byte[]>(size)) {}

  // Returns `round` with the weights in the payload's place.
  RoundResult ResultOf(RoundResult round) const {
    round.wire = FormatOf(type);
    round.payload = Payload({bytes.get(), size}, bytes);
    return round;
  }

  DType type;
  uint64_t size;
  std::shared_ptr<std::byte[]> bytes;
};

// Returns `round` with what these weights differ from those that nodes have, in the payload's
// place, and advances what they have by what they will decode. Nodes that have none get all.
absl::StatusOr<RoundResult> DifferenceOf(const WeightsBuffer& weights, RoundResult round,
                                         WireFormat down, std::vector<float>& sent) {
  const auto* const values = reinterpret_cast<const float*>(weights.bytes.get());
  if (sent.empty()) {
    sent.assign(values, values + round.elems);
    return weights.ResultOf(std::move(round));
  }
  std::vector<float> difference(round.elems);
  for (uint64_t i = 0; i < round.elems; ++i) difference[i] = values[i] - sent[i];
  const auto bytes =
      std::make_shared_for_overwrite<std::byte[]>(MaxEncodedBytes(down, round.elems));
  const Encoded encoded =
      EncodeLossy(down, 0, difference.data(), nullptr, round.elems, bytes.get());
  round.wire = down;
  round.payload = Payload({bytes.get(), encoded.bytes}, bytes);
  THALWEG_RETURN_IF_ERROR(
      DecodeLossy(round.payload, down, DType::kFloat32, round.elems, difference.data()));
  for (uint64_t i = 0; i < round.elems; ++i) sent[i] += difference[i];
  return round;
}

// A Gradient is what an update is of. LAMB's is in the moments, and has no values.
struct Gradient {
  const float* values = nullptr;
  std::vector<float> own = {};  // where the values are, unless they are where they came
};

// Returns the gradient that a mean has, which must outlive it.
absl::StatusOr<Gradient> GradientOf(const RoundResult& mean) {
  Gradient gradient;
  if (mean.wire == WireFormat::kFloat32 && mean.payload.pieces.size() == 1) {
    const void* const bytes = mean.payload.pieces[0].data();
    gradient.values = static_cast<const float*>(bytes);
    const bool is_aligned = reinterpret_cast<uintptr_t>(bytes) % alignof(float) == 0;
    if (is_aligned && mean.payload.SizeBytes() == mean.elems * sizeof(float)) return gradient;
  }
  gradient.own.resize(mean.elems);
  gradient.values = gradient.own.data();
  THALWEG_RETURN_IF_ERROR(Decode(mean, gradient.own.data()));
  return gradient;
}

// Returns the gradient that the last push has left.
absl::StatusOr<Gradient> TakeKept(const RoundResult& round, const UpdateRule& rule,
                                  ChunkState& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  if (rule.optimizer == Optimizer::kLamb) {
    if (!std::exchange(state.is_measured, false)) return NothingWaits(round);
    return Gradient();
  }
  Gradient gradient;
  gradient.own.swap(state.mean);
  gradient.values = gradient.own.data();
  if (gradient.own.size() != round.elems) return NothingWaits(round);
  return gradient;
}

absl::StatusOr<AppliedUpdate> Apply(std::optional<uint32_t> alone, const RoundResult& mean,
                                    const UpdateRule& rule, std::span<const UpdatePiece> pieces,
                                    const UpdateStep& step, ChunkState& state) {
  Gradient gradient;
  if (!rule.commits) {
    THALWEG_ASSIGN_OR_RETURN(gradient, GradientOf(mean));
  }
  const WeightsBuffer buffer(rule, mean.elems);
  AppliedUpdate applied;
  {
    MutexLock lock(state.mutex);
    Weights& weights = state.WeightsToChange();
    if (weights.params.size() != mean.elems) return NoWeights(mean);
    Versions& versions = state.versions;
    if (rule.ahead > 0 && mean.id.round != versions.latest + 1) {
      return absl::FailedPreconditionError(
          absl::StrCat(ToString(mean.id), " updates weights of version ", versions.latest));
    }
    if (rule.commits) {
      THALWEG_ASSIGN_OR_RETURN(gradient, TakeKept(mean, rule, state));
    }
    if (gradient.values != nullptr) ++weights.steps;
    if (alone) applied.staleness = versions.latest - versions.seen[*alone];
    const Arrays arrays{weights, gradient.values, buffer.bytes.get(), buffer.type};
    if (rule.delay_aware) {
      Step(arrays, rule, pieces, Slowed(step, applied.staleness));
    } else {
      Step(arrays, rule, pieces, step);
    }
    applied.version = ++versions.latest;
    if (alone) versions.seen[*alone] = applied.version;
    if (rule.sends_differences()) {
      THALWEG_ASSIGN_OR_RETURN(applied.result, DifferenceOf(buffer, mean, rule.down, state.sent));
      return applied;
    }
  }
  applied.result = buffer.ResultOf(mean);
  return applied;
}

}  // namespace

absl::StatusOr<AppliedUpdate> UpdateWeights(const RoundResult& mean, const UpdateRule& rule,
                                            std::span<const UpdatePiece> pieces,
                                            const UpdateStep& step, ChunkState& state) {
  if (step.measures) {
    AppliedUpdate measured;
    THALWEG_ASSIGN_OR_RETURN(measured.result, Measure(mean, rule, pieces, step, state));
    return measured;
  }
  return Apply(std::nullopt, mean, rule, pieces, step, state);
}

absl::StatusOr<AppliedUpdate> UpdateAlone(uint32_t node, const RoundResult& mean,
                                          const UpdateRule& rule,
                                          std::span<const UpdatePiece> pieces,
                                          const UpdateStep& step, ChunkState& state) {
  return Apply(node, mean, rule, pieces, step, state);
}

absl::StatusOr<std::optional<AppliedUpdate>> AskForWeights(const Versions::Ask& ask,
                                                           const RoundResult& contributed,
                                                           const UpdateRule& rule,
                                                           ChunkState& state) {
  MutexLock lock(state.mutex);
  if (state.versions.latest < ask.least) {
    state.versions.asks.push_back(ask);
    return std::nullopt;
  }
  if (state.weights.params.size() != contributed.elems) return NoWeights(contributed);
  const WeightsBuffer buffer(rule, contributed.elems);
  Cast(DType::kFloat32, state.weights.params.data(), buffer.type, buffer.bytes.get(),
       contributed.elems);
  return AppliedUpdate{buffer.ResultOf(contributed), state.versions.latest};
}

std::vector<Versions::Ask> TakeAnswered(uint64_t version, ChunkState& state) {
  MutexLock lock(state.mutex);
  std::vector<Versions::Ask>& asks = state.versions.asks;
  const auto waiting = std::partition(
      asks.begin(), asks.end(), [&](const Versions::Ask& ask) { return ask.least > version; });
  std::vector<Versions::Ask> answered(waiting, asks.end());
  asks.erase(waiting, asks.end());
  return answered;
}

}  // namespace thalweg
