#include "server/sidecar/bucket/job_compression.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/sidecar/codec/tensor_set.h"

namespace thalweg {
namespace {

// Bytes per second, nanoseconds or seconds.
constexpr double kMostMeasured = 1e15;

CompressionLoss Sum(const std::map<uint32_t, CompressionLoss>& losses) {
  CompressionLoss sum;
  for (const auto& [index, loss] : losses) sum += loss;
  return sum;
}

}  // namespace

JobCompression::JobCompression(std::string job, const CodecPolicy& policy, uint32_t num_nodes,
                               uint32_t num_shards, SidecarMetrics& metrics)
    : job_(std::move(job)),
      policy_(policy),
      metrics_(metrics),
      candidates_(policy.fallback.kind == CodecKind::kAuto && num_nodes > 1
                      ? AutoCandidates(policy.fallback)
                      : std::vector<CodecSpec>()),
      terms_{candidates_, {}, {}, num_nodes, num_shards} {}

JobCompression::~JobCompression() {
  metrics_.compressed_since.Clear(this);
  metrics_.residual_norm.Clear(this);
  metrics_.compression_error.Clear(this);
  for (const CodecSpec& candidate : candidates_) {
    PredictedSeconds(candidate).Clear(this);
    ChosenFor(candidate).Clear(this);
  }
}

void JobCompression::Agree(const Terms& agreed, const ShareForecast& forecast) {
  MutexLock lock(mutex_);
  terms_.costs = agreed.costs;
  terms_.link = agreed.link;
  terms_.seconds_per_byte = forecast.seconds_per_byte;
}

std::vector<double> JobCompression::measured() const {
  if (candidates_.empty()) return {};
  MutexLock lock(mutex_);
  std::vector<double> numbers{terms_.link.bytes_per_second,
                              static_cast<double>(ToNanos(terms_.link.round_trip)),
                              terms_.seconds_per_byte};
  for (const CodecCost& cost : terms_.costs) {
    numbers.insert(numbers.end(), {cost.node, cost.shard, cost.factors});
  }
  return numbers;
}

absl::Status JobCompression::Restore(const std::vector<double>& measured,
                                     uint64_t compressed_since) {
  constexpr size_t kEach = 3;  // numbers, of the links and of each candidate
  const size_t expected = candidates_.empty() ? 0 : kEach * (1 + candidates_.size());
  const bool are_numbers = std::all_of(measured.begin(), measured.end(), [](double number) {
    return number >= 0 && number <= kMostMeasured;
  });
  if (measured.size() != expected || !are_numbers) {
    return absl::InvalidArgumentError(absl::StrCat("workers brought ", measured.size(),
                                                   " numbers by which auto chooses, expected ",
                                                   expected, ", none of them negative"));
  }
  MutexLock lock(mutex_);
  if (!measured.empty()) {
    terms_.link = {measured[0], std::chrono::nanoseconds(static_cast<int64_t>(measured[1]))};
    terms_.seconds_per_byte = measured[2];
    terms_.costs.clear();
    for (size_t i = kEach; i < measured.size(); i += kEach) {
      terms_.costs.push_back({measured[i], measured[i + 1], measured[i + 2]});
    }
  }
  compressed_since_ = compressed_since;
  if (compressed_since > 0) {
    metrics_.compressed_since.Show(static_cast<double>(compressed_since), this);
  }
  return absl::OkStatus();
}

uint32_t JobCompression::Choose(BucketId id, const BucketLayout& layout) {
  std::vector<uint32_t> open;  // tensors that no rule is about
  for (uint32_t i = 0; i < layout.tensors.size(); ++i) {
    if (policy_.CodecOf(layout.tensors[i]).kind == CodecKind::kAuto) open.push_back(i);
  }
  if (open.empty() || candidates_.empty()) return 0;
  MutexLock lock(mutex_);
  AutoChoice& choice = choices_[id.index];
  choice = ChooseCodec(TensorSet(layout, open).layout(), terms_);
  spdlog::info("job '{}': bucket {}: {}", job_, ToString(id), choice.reason);
  ShowChoices();
  return choice.codec;
}

// Summed over the buckets, of which a model may have thousands.
void JobCompression::ShowChoices() {
  for (uint32_t k = 0; k < candidates_.size(); ++k) {
    double seconds = 0;
    double buckets = 0;
    for (const auto& [index, choice] : choices_) {
      seconds += choice.seconds[k];
      if (choice.codec == k) ++buckets;
    }
    PredictedSeconds(candidates_[k]).Show(seconds, this);
    ChosenFor(candidates_[k]).Show(buckets, this);
  }
}

Gauge& JobCompression::PredictedSeconds(const CodecSpec& codec) const {
  return metrics_.registry.GetGauge(
      "thalweg_sidecar_auto_predicted_seconds",
      "What auto has predicted that a codec would add to a step, by codec",
      {{"codec", codec.Name()}});
}

Gauge& JobCompression::ChosenFor(const CodecSpec& codec) const {
  return metrics_.registry.GetGauge("thalweg_sidecar_auto_buckets",
                                    "Buckets for which auto has chosen a codec",
                                    {{"codec", codec.Name()}});
}

void JobCompression::Count(const NodeBucket& bucket) {
  const auto gave_up = [](const auto& codec) { return codec->gave_up(); };
  if (std::any_of(bucket.compressing().begin(), bucket.compressing().end(), gave_up)) {
    metrics_.given_up_buckets.Add();
    return;
  }
  metrics_.compressed_buckets.Add();
  MutexLock lock(mutex_);
  uint64_t rounds = 0;
  for (const auto& codec : bucket.compressing()) rounds = std::max(rounds, codec->rounds());
  if (compressed_since_ == 0) {
    compressed_since_ = rounds + 1;
    metrics_.compressed_since.Show(static_cast<double>(compressed_since_), this);
    spdlog::info("job '{}': compression has begun after {} iterations", job_, rounds);
  }
  CompressionLoss sample;
  for (const auto& codec : bucket.compressing()) sample += codec->loss();
  // A gradient that is not finite has no norm: the last sample stays.
  if (std::isfinite(sample.whole) && std::isfinite(sample.residual)) {
    loss_[bucket.id().index] = sample;
  }
  const CompressionLoss whole = Sum(loss_);
  metrics_.residual_norm.Show(std::sqrt(whole.residual), this);
  metrics_.compression_error.Show(ErrorRatio(whole), this);
}

void JobCompression::Describe(ipc::Complete& message) {
  MutexLock lock(mutex_);
  const CompressionLoss whole = Sum(loss_);
  message.compressed_since = compressed_since_;
  message.residual_norm = std::sqrt(whole.residual);
  message.error_ratio = ErrorRatio(whole);
}

}  // namespace thalweg
