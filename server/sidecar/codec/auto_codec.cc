#include "server/sidecar/codec/auto_codec.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/clock.h"
#include "core/base/wire_format.h"
#include "kernels/codec/powersgd/powersgd.h"

namespace thalweg {
namespace {

// By so much predictions may be wrong at least: it is not worth any digits of the gradients.
constexpr double kNoDifference = 1.02;

// A Prediction is what a candidate would cost for the tensors.
struct Prediction {
  double sent_bytes = 0;  // by a node
  double node_seconds = 0;
  double shard_seconds = 0;
  bool in_two_steps = false;
  double seconds = 0;  // of all that
};

double AsFp32(uint64_t elems) { return static_cast<double>(elems) * sizeof(float); }

// Elements that cross the network as elements of `wire` type.
void AddDense(const AutoTerms& terms, DType wire, uint64_t elems, Prediction& prediction) {
  const auto is_it = [wire](const CodecSpec& spec) {
    return spec.kind == CodecKind::kCast && spec.wire == wire;
  };
  const auto cast = std::find_if(terms.candidates.begin(), terms.candidates.end(), is_it);
  const auto measured = cast == terms.candidates.end() ? 0 : cast - terms.candidates.begin();
  const CodecCost& cost = terms.costs[static_cast<size_t>(measured)];
  prediction.sent_bytes += static_cast<double>(elems * SizeOf(wire));
  prediction.node_seconds += AsFp32(elems) * cost.node;
  prediction.shard_seconds += AsFp32(elems) * cost.shard;
}

void AddFactors(const TensorSpec& tensor, const CodecSpec& spec, const CodecCost& cost,
                Prediction& prediction) {
  const auto rows = static_cast<uint64_t>(tensor.shape[0]);
  const uint64_t columns = tensor.Elems() / rows;
  const uint64_t elems = (rows + columns) * FactorRank(rows, columns, spec.rank);
  prediction.sent_bytes += static_cast<double>(elems * SizeOf(spec.wire));
  prediction.node_seconds += AsFp32(tensor.Elems()) * cost.node + AsFp32(elems) * cost.factors;
  prediction.shard_seconds += AsFp32(elems) * cost.shard;
}

bool BecomesFactors(const TensorSpec& tensor, const CodecSpec& spec) {
  if (tensor.shape.empty() || tensor.Elems() == 0) return false;
  const auto rows = static_cast<uint64_t>(tensor.shape[0]);
  return Compresses(rows, tensor.Elems() / rows, spec.rank, spec.min_rate);
}

// Without `seconds`.
Prediction LoadOf(const BucketLayout& layout, const AutoTerms& terms, size_t candidate) {
  const CodecSpec& spec = terms.candidates[candidate];
  const CodecCost& cost = terms.costs[candidate];
  Prediction prediction;
  const bool is_compressible = layout.dtype != DType::kFloat64;
  if (IsLossy(spec) && is_compressible) {
    const uint64_t elems = layout.Elems();
    prediction.sent_bytes = static_cast<double>(MaxEncodedBytes(LossyFormat(spec), elems));
    prediction.node_seconds = AsFp32(elems) * cost.node;
    prediction.shard_seconds = AsFp32(elems) * cost.shard;
    return prediction;
  }
  const bool has_factors = spec.kind == CodecKind::kPowerSgd && is_compressible;
  for (const TensorSpec& tensor : layout.tensors) {
    if (!has_factors || !BecomesFactors(tensor, spec)) continue;
    AddFactors(tensor, spec, cost, prediction);
    prediction.in_two_steps = true;
  }
  // The other tensors travel with the factors, in their type.
  const DType dense = prediction.in_two_steps ? spec.wire : DenseType(layout.dtype, spec);
  for (const TensorSpec& tensor : layout.tensors) {
    if (has_factors && BecomesFactors(tensor, spec)) continue;
    AddDense(terms, dense, tensor.Elems(), prediction);
  }
  return prediction;
}

// Returns what the slowest link takes for a byte that each node sends.
double LinkSecondsPerByte(const AutoTerms& terms) {
  if (terms.seconds_per_byte > 0) return terms.seconds_per_byte;
  const double rate = terms.link.bytes_per_second;
  if (rate <= 0) return 0;
  return std::max(1.0, static_cast<double>(terms.num_nodes) / terms.num_shards) / rate;
}

Prediction Predict(const BucketLayout& layout, const AutoTerms& terms, size_t candidate) {
  Prediction prediction = LoadOf(layout, terms, candidate);
  const double link = prediction.sent_bytes * LinkSecondsPerByte(terms);
  const double exchange = std::max(link, prediction.shard_seconds / terms.num_shards);
  const double round_trip = ToSeconds(terms.link.round_trip);
  prediction.seconds = prediction.in_two_steps
                           ? prediction.node_seconds + exchange + 2 * round_trip
                           : std::max(prediction.node_seconds, exchange) + round_trip;
  return prediction;
}

// With three digits and the largest of `units`, by which each is 1000 times the next, that leaves
// no zero before the point.
std::string Quantity(double value, double largest, std::span<const char* const> units) {
  double unit = largest;
  while (units.size() > 1 && value < 0.9995 * unit) {
    unit /= 1000;
    units = units.subspan(1);
  }
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value / unit,
                                 std::chars_format::general, 3);
  return absl::StrCat(absl::string_view(digits.data(), end.ptr - digits.data()), " ",
                      units.front());
}

std::string Bytes(double bytes) {
  constexpr std::array kUnits = {"GB", "MB", "kB", "B"};
  return Quantity(bytes, 1e9, kUnits);
}

std::string Seconds(double seconds) {
  constexpr std::array kUnits = {"s", "ms", "µs"};
  return Quantity(seconds, 1, kUnits);
}

std::string Describe(const CodecSpec& spec, const Prediction& prediction) {
  return absl::StrCat(spec.Name(), " ", Seconds(prediction.seconds), " (sends ",
                      Bytes(prediction.sent_bytes), ", computes ", Seconds(prediction.node_seconds),
                      ")");
}

std::string Reason(const BucketLayout& layout, const AutoTerms& terms,
                   const std::vector<Prediction>& predictions, size_t chosen) {
  std::vector<size_t> others(predictions.size());
  std::iota(others.begin(), others.end(), 0);
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(chosen));
  std::sort(others.begin(), others.end(), [&](size_t a, size_t b) {
    return std::pair(predictions[a].seconds, a) < std::pair(predictions[b].seconds, b);
  });
  const auto describe = [&](std::string* out, size_t i) {
    out->append(Describe(terms.candidates[i], predictions[i]));
  };
  const double rate = terms.link.bytes_per_second;
  const auto bytes = static_cast<double>(layout.Elems() * SizeOf(layout.dtype));
  const bool as_it_is = terms.candidates[chosen] == CodecSpec();
  return absl::StrCat(Bytes(bytes), " in ", layout.tensors.size(), " tensors ",
                      rate > 0 ? absl::StrCat("at ", Bytes(rate), "/s") : "without a network", ": ",
                      as_it_is ? "compression would not help: " : "",
                      Describe(terms.candidates[chosen], predictions[chosen]), " rather than ",
                      absl::StrJoin(others, ", ", describe));
}

}  // namespace

AutoChoice ChooseCodec(const BucketLayout& tensors, const AutoTerms& terms) {
  std::vector<Prediction> predictions;
  AutoChoice choice;
  for (size_t i = 0; i < terms.candidates.size(); ++i) {
    predictions.push_back(Predict(tensors, terms, i));
    choice.seconds.push_back(predictions.back().seconds);
  }
  const double best = *std::min_element(choice.seconds.begin(), choice.seconds.end());
  while (choice.seconds[choice.codec] > best * kNoDifference) ++choice.codec;
  choice.reason = Reason(tensors, terms, predictions, choice.codec);
  return choice;
}

}  // namespace thalweg
