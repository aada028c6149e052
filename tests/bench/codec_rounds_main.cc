// thalweg-codec-rounds CODEC THREADS is the program behind `thalweg bench codec`. It takes one
// bucket with the gradients of a whole model through a codec's rounds as the sidecar of a job's
// only node would, without a network and shards.
//
// Standard input has the shape of a gradient on each line, as in 64x3x7x7, then an empty line, then
// a line for each round to run. Each round is answered with a line of JSON: its seconds, and the
// seconds for copying the gradients.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/codec_policy.h"
#include "core/base/status_macros.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "server/sidecar/bucket/make_codecs.h"
#include "server/sidecar/codec/fold_pool.h"
#include "server/sidecar/device/cpu_device.h"

namespace thalweg {
namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint64_t kMaxElems = uint64_t{1} << 33;
constexpr uint32_t kMaxThreads = 256;

// A WholeGradient is the share of a node's only worker: there is nothing to fold or to wait for.
class WholeGradient : public Gradient {
 public:
  explicit WholeGradient(const std::vector<float>& values)
      : Gradient(DType::kFloat32), values_(values) {}

  absl::Status WaitFor(uint64_t /*end*/) override { return absl::OkStatus(); }
  std::vector<const void*> Shares(uint64_t begin) const override {
    return {values_.data() + begin};
  }

 private:
  const std::vector<float>& values_;
};

// Only the main thread uses Rounds.
class Rounds {
 public:
  static absl::StatusOr<std::unique_ptr<Rounds>> Create(const BucketLayout& layout,
                                                        const CodecPolicy& policy,
                                                        uint32_t threads) {
    std::unique_ptr<Rounds> rounds(new Rounds(layout, threads));
    const CodecChoice choice{policy};
    const CodecPlace place{{}, kChunkBytes, 1};
    THALWEG_ASSIGN_OR_RETURN(rounds->memory_,
                             CpuDevice().MakeMemory({{}, layout, DType::kFloat32, 1}));
    BucketMemory& memory = *rounds->memory_;
    THALWEG_ASSIGN_OR_RETURN(rounds->codecs_,
                             MakeCodecs(layout, memory, place, choice, rounds->states_));
    if (!rounds->codecs_.empty()) return rounds;
    if (!policy.IsPlainCast()) {
      return absl::InvalidArgumentError(
          absl::StrCat("no shape has enough to gain by ", policy.ToString(),
                       ": give larger ones, or a lower rank or min_rate"));
    }
    rounds->codecs_.push_back(MakeDenseCodec(layout, memory, place, choice));
    return rounds;
  }

  absl::StatusOr<double> Run() {
    WholeGradient gradient(gradient_);
    const TimePoint start = Now();
    for (const auto& codec : codecs_) {
      THALWEG_ASSIGN_OR_RETURN(Part * part, codec->Begin(pool_, gradient));
      while (part != nullptr) {
        THALWEG_RETURN_IF_ERROR(Exchange(*codec, *part, gradient));
        if (codec->EndsWith(*part)) break;
        THALWEG_ASSIGN_OR_RETURN(part, codec->Next(pool_, gradient));
      }
    }
    const double seconds = ToSeconds(Now() - start);
    for (const auto& codec : codecs_) codec->CountRound();
    return seconds;
  }

  // Checks the first round: nothing has been left out before, so a gradient is the sum of its
  // result and of what is left out now. Both come from one rounded subtraction.
  absl::Status CheckFirst() const {
    constexpr float kAllowed = 2e-7f;  // of the larger magnitude: 2^-23, rounded up
    // Uncompressed values lose the digits that the wire's type does not have.
    constexpr float kWireError = 0x1p-8f;
    uint64_t offset = 0;
    for (const TensorSpec& tensor : layout_.tensors) {
      const auto state = states_.find(tensor.name);
      const bool has_residual = state != states_.end() && !state->second->residual.empty();
      for (uint64_t i = 0; i < tensor.Elems(); ++i) {
        const float left = has_residual ? state->second->residual.data()[i] : 0;
        const float expected = gradient_[offset + i];
        const float got = Result()[offset + i];
        const float allowed = kAllowed * (std::abs(got) + std::abs(left) + std::abs(expected)) +
                              (has_residual ? 0 : kWireError * std::abs(expected));
        // The condition is not >, so that NaN is wrong too.
        if (!(std::abs(got + left - expected) <= allowed)) {
          return absl::DataLossError(absl::StrCat("gradient '", tensor.name, "', element ", i,
                                                  ": the result ", got, " and what is left, ", left,
                                                  ", should give ", expected));
        }
      }
      offset += tensor.Elems();
    }
    return absl::OkStatus();
  }

  // Copies the gradients once, over the result, in one piece for each thread: memcpy bypasses the
  // caches only for large copies, and is slower by a third when it does not.
  absl::StatusOr<double> Copy() {
    const TimePoint start = Now();
    const uint64_t elems = gradient_.size();
    const uint64_t piece = (elems + threads_ - 1) / threads_;
    THALWEG_RETURN_IF_ERROR(pool_.Run(threads_, [&](uint32_t thread) {
      const uint64_t begin = std::min(elems, thread * piece);
      const uint64_t count = std::min(piece, elems - begin);
      std::memcpy(Result() + begin, gradient_.data() + begin, count * sizeof(float));
      return absl::OkStatus();
    }));
    return ToSeconds(Now() - start);
  }

 private:
  Rounds(const BucketLayout& layout, uint32_t threads)
      : layout_(layout), threads_(threads), pool_(threads), gradient_(layout.Elems()) {
    SeedDirection({.seed = 1}, gradient_);
  }

  float* Result() const { return reinterpret_cast<float*>(memory_->result().payload()); }

  // The mean over one node is its own share, as encoded.
  absl::Status Exchange(BucketCodec& codec, Part& part, Gradient& gradient) {
    part.BeginRound();
    return pool_.Run(part.plan.Count(), [&](uint32_t chunk) -> absl::Status {
      THALWEG_ASSIGN_OR_RETURN(const auto share, codec.Encode(part, chunk, gradient));
      RoundResult result;
      result.id = {part.bucket.id, chunk, part.round};
      result.wire = part.bucket.wire;
      result.elems = part.plan.Elems(chunk);
      result.payload = Payload(share, nullptr);
      return codec.Decode(part, result);
    });
  }

  const BucketLayout layout_;
  const uint32_t threads_;
  FoldPool pool_;
  ParameterStates states_;
  std::vector<float> gradient_;
  std::unique_ptr<BucketMemory> memory_;  // outlives codecs_
  std::vector<std::unique_ptr<BucketCodec>> codecs_;
};

absl::StatusOr<BucketLayout> ReadShapes(std::istream& in) {
  BucketLayout layout{DType::kFloat32, {}};
  uint64_t elems = 0;
  for (std::string line; std::getline(in, line) && !line.empty();) {
    TensorSpec tensor{absl::StrCat("gradient", layout.tensors.size()), {}};
    uint64_t product = 1;
    for (const absl::string_view text : absl::StrSplit(line, 'x')) {
      int64_t extent = 0;
      if (!absl::SimpleAtoi(text, &extent) || extent < 1 ||
          static_cast<uint64_t>(extent) > kMaxElems / product) {
        return absl::InvalidArgumentError(absl::StrCat("a shape is '", line, "', expected numbers ",
                                                       "from 1 with x between them, ", kMaxElems,
                                                       " elements at most"));
      }
      product *= static_cast<uint64_t>(extent);
      tensor.shape.push_back(extent);
    }
    elems += product;
    if (elems > kMaxElems) {
      return absl::InvalidArgumentError(
          absl::StrCat("the shapes have more than ", kMaxElems, " elements: give fewer"));
    }
    layout.tensors.push_back(std::move(tensor));
  }
  return layout;
}

absl::Status Serve(const char* codec, const char* threads_text) {
  THALWEG_ASSIGN_OR_RETURN(const CodecPolicy policy, CodecPolicy::Parse(codec));
  uint32_t threads = 0;
  if (!absl::SimpleAtoi(threads_text, &threads) || threads < 1 || threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("THREADS is '", threads_text, "', expected a number from 1 to ", kMaxThreads));
  }
  THALWEG_ASSIGN_OR_RETURN(const BucketLayout layout, ReadShapes(std::cin));
  THALWEG_ASSIGN_OR_RETURN(const auto rounds, Rounds::Create(layout, policy, threads));
  bool first = true;
  for (std::string line; std::getline(std::cin, line);) {
    THALWEG_ASSIGN_OR_RETURN(const double seconds, rounds->Run());
    if (first) THALWEG_RETURN_IF_ERROR(rounds->CheckFirst());
    first = false;
    THALWEG_ASSIGN_OR_RETURN(const double copy_seconds, rounds->Copy());
    std::cout << absl::StrFormat("{\"seconds\": %.9f, \"copy_seconds\": %.9f}", seconds,
                                 copy_seconds)
              << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: thalweg-codec-rounds CODEC THREADS < shapes and rounds\n";
    return 2;
  }
  const absl::Status status = thalweg::Serve(argv[1], argv[2]);
  if (status.ok()) return 0;
  std::cerr << "thalweg-codec-rounds: " << status.message() << "\n";
  return 1;
}
