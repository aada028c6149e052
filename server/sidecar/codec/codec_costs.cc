#include "server/sidecar/codec/codec_costs.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "core/base/clock.h"
#include "core/base/payload.h"
#include "core/base/wire_format.h"
#include "kernels/codec/dense.h"
#include "kernels/codec/lossy.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "kernels/codec/powersgd/powersgd.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

// The measured matrix is square and has 1 MiB: about a chunk, and large enough that calls cost
// little.
constexpr size_t kSide = 512;
constexpr size_t kElems = kSide * kSide;
constexpr double kBytes = kElems * sizeof(float);

// Other processes use the processor at times: the fastest of a few runs is the time of the code
// alone.
constexpr int kMostRuns = 5;
constexpr double kEnoughSeconds = 1.5e-3;

// More contributions and higher ranks take so long that they are extrapolated instead.
constexpr uint32_t kMostContributions = 4;
constexpr uint32_t kHighestRank = 8;

template <class Run>
double BestSeconds(const Run& run) {
  double best = std::numeric_limits<double>::infinity();
  double total = 0;
  // The first run only brings memory and code into the caches.
  for (int i = 0; i < kMostRuns && (i < 2 || total < kEnoughSeconds); ++i) {
    const TimePoint start = Now();
    run();
    const double seconds = ToSeconds(Now() - start);
    best = std::min(best, seconds);
    total += seconds;
  }
  return best;
}

// A Bench runs the stages of a job with `num_nodes`, repeatedly on the same gradient. Its kernels
// cannot fail on sizes that fit.
class Bench {
 public:
  explicit Bench(uint32_t num_nodes)
      : num_nodes_(num_nodes),
        contributions_(std::min(num_nodes, kMostContributions)),
        workers_(contributions_.size(), 1) {
    SeedDirection({}, gradient_);
  }

  CodecCost Cast(DType wire) {
    const size_t size = SizeOf(wire);
    const void* share = gradient_.data();
    constexpr float kWeight = 1;
    double encode = 0;
    // fp32 is sent without a copy.
    if (wire != DType::kFloat32) {
      encode = BestSeconds([&] {
        FoldMean({&share, 1}, {&kWeight, 1}, 1, DType::kFloat32, wire, sent_.data(), kElems);
      });
    }
    SetSent(kElems * size);
    const double decode = BestSeconds([&] {
      DecodePayload(contributions_[0], wire, DType::kFloat32, kElems, result_.data()).IgnoreError();
    });
    return {(encode + decode) / kBytes, FoldCost(wire), 0};
  }

  CodecCost Lossy(const CodecSpec& spec) {
    const WireFormat format = LossyFormat(spec);
    float* const residual = spec.feedback ? residual_.data() : nullptr;
    Encoded encoded;
    const double encode = BestSeconds([&] {
      encoded =
          EncodeLossy(format, spec.topk_ratio, gradient_.data(), residual, kElems, sent_.data());
    });
    SetSent(encoded.bytes);
    const double decode = BestSeconds([&] {
      DecodeLossy(contributions_[0], format, DType::kFloat32, kElems, result_.data()).IgnoreError();
    });
    std::vector<std::byte> out(MaxFoldedBytes(contributions_, format, kElems));
    const double fold = BestSeconds([&] {
      FoldLossy(contributions_, workers_, format, kElems, shard_residual_.data(), out.data())
          .IgnoreError();
    });
    return {(encode + decode) / kBytes, OfAllNodes(fold) / kBytes, 0};
  }

  CodecCost PowerSgd(const CodecSpec& spec) {
    const uint32_t rank = std::min(spec.rank, kHighestRank);
    const double more = static_cast<double>(spec.rank) / rank;
    const FactorShape shape{kSide, kSide, rank};
    std::vector<float> p(kSide * rank);
    std::vector<float> q(kSide * rank);
    SeedDirection({.column = 1}, q);
    const double passes = BestSeconds([&] {
      AddErrorAndProject(shape, gradient_, residual_, residual_, q, p);
      ProjectTransposed(shape, residual_, p, 0, kSide, q);
      Reconstruct(shape, p, q, residual_, result_);
    });
    SeedDirection({.column = 2}, p);
    SeedDirection({.column = 3}, q);
    const double orthogonalise = BestSeconds([&] {
      OrthogonaliseRows(q, rank, spec.epsilon);
      OrthogonaliseColumns(p, rank, spec.epsilon);
    });
    const auto factor_bytes = static_cast<double>((p.size() + q.size()) * sizeof(float));
    SetSent(kElems * SizeOf(spec.wire));
    return {more * passes / kBytes, FoldCost(spec.wire), more * orthogonalise / factor_bytes};
  }

 private:
  // Sets the contents of a contribution: the first bytes of `sent_`, whatever they are.
  void SetSent(size_t bytes) {
    const Payload payload(std::span<const std::byte>(sent_).first(bytes), nullptr);
    std::fill(contributions_.begin(), contributions_.end(), payload);
  }

  // Returns the cost per byte in fp32, of contributions in `wire` type.
  double FoldCost(DType wire) {
    uint64_t nonfinite = 0;
    const double fold = BestSeconds([&] {
      FoldPayloads(contributions_, workers_, wire, kElems, result_.data(), &nonfinite)
          .IgnoreError();
    });
    return OfAllNodes(fold) / kBytes;
  }

  double OfAllNodes(double fold_seconds) const {
    return fold_seconds * num_nodes_ / static_cast<double>(contributions_.size());
  }

  const uint32_t num_nodes_;
  std::vector<Payload> contributions_;
  const std::vector<uint32_t> workers_;
  std::vector<float> gradient_ = std::vector<float>(kElems);
  std::vector<float> residual_ = std::vector<float>(kElems);
  std::vector<float> shard_residual_ = std::vector<float>(kElems);
  std::vector<float> result_ = std::vector<float>(kElems);
  // The size allows for formats that send indices and so possibly more than the gradient.
  std::vector<std::byte> sent_ = std::vector<std::byte>(MaxLossyBytes(kElems));
};

CodecCost Measure(Bench& bench, const CodecSpec& spec) {
  if (spec.kind == CodecKind::kPowerSgd) return bench.PowerSgd(spec);
  return IsLossy(spec) ? bench.Lossy(spec) : bench.Cast(spec.wire);
}

}  // namespace

std::vector<CodecCost> MeasureCosts(std::span<const CodecSpec> candidates, uint32_t num_nodes,
                                    uint32_t threads) {
  Bench bench(num_nodes);
  std::vector<CodecCost> costs;
  for (const CodecSpec& spec : candidates) {
    const CodecCost alone = Measure(bench, spec);
    costs.push_back({alone.node / threads, alone.shard / threads, alone.factors / threads});
  }
  return costs;
}

}  // namespace thalweg
