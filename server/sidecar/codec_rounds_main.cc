// thalweg-codec-rounds CODEC THREADS: what `thalweg bench codec` measures. Takes one bucket with
// the gradients of a whole model through PowerSGD's rounds as the sidecar of a job's only node
// would, with nothing in the place of the network.
//
// Standard input has the shape of a gradient on each line, as in 64x3x7x7, then an empty line, then
// a line for each round that is to be run. Each round is answered with a line of JSON: its seconds,
// and those that copying the gradients takes.

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
#include "core/base/codec_spec.h"
#include "core/base/status_macros.h"
#include "kernels/codec/orthogonalise.h"
#include "server/sidecar/device/cpu_device.h"
#include "server/sidecar/fold_pool.h"
#include "server/sidecar/power_sgd.h"

namespace thalweg {
namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint64_t kMaxElems = uint64_t{1} << 33;
constexpr uint32_t kMaxThreads = 256;

// The share of a node's only worker: nothing to fold, nothing to wait for.
class WholeGradient : public GradientSource {
 public:
  explicit WholeGradient(const std::vector<float>& values) : values_(values) {}

  absl::Status WaitFor(uint64_t end) override { return absl::OkStatus(); }
  const float* Read(uint64_t begin, uint64_t elems, std::vector<float>& tile) override {
    return values_.data() + begin;
  }

 private:
  const std::vector<float>& values_;
};

// One thread: main.
class Rounds {
 public:
  static absl::StatusOr<std::unique_ptr<Rounds>> Create(const BucketLayout& layout,
                                                        const CodecSpec& spec, uint32_t threads) {
    if (spec.kind != CodecKind::kPowerSgd) {
      return absl::InvalidArgumentError(
          absl::StrCat("codec is ", spec.ToString(), ", expected powersgd: others are casts"));
    }
    std::unique_ptr<Rounds> rounds(new Rounds(layout, spec, threads));
    THALWEG_ASSIGN_OR_RETURN(
        rounds->codec_, PowerSgd::Create(rounds->dense_, spec, kChunkBytes, 1, rounds->states_));
    if (rounds->codec_ == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("no shape has enough to gain by ", spec.ToString(),
                       ": give larger ones, or a lower rank or min_rate"));
    }
    return rounds;
  }

  absl::StatusOr<double> Run() {
    WholeGradient gradient(gradient_);
    const TimePoint start = Now();
    THALWEG_RETURN_IF_ERROR(codec_->Project(pool_, device_, gradient));
    THALWEG_RETURN_IF_ERROR(Exchange(codec_->first()));
    THALWEG_RETURN_IF_ERROR(codec_->ProjectTransposed(pool_, device_));
    THALWEG_RETURN_IF_ERROR(Exchange(codec_->second()));
    const auto nonfinite =
        codec_->Reconstruct(pool_, device_, reinterpret_cast<std::byte*>(result_.data()));
    const double seconds = ToSeconds(Now() - start);
    THALWEG_RETURN_IF_ERROR(nonfinite.status());
    codec_->CountRound();
    return seconds;
  }

  // After the first round: nothing has been left out before, so that a gradient is the sum of its
  // result and of what is left out now. Both come from one rounded subtraction.
  absl::Status CheckFirst() const {
    constexpr float kAllowed = 2e-7f;  // of the larger one's magnitude: 2^-23, rounded up
    uint64_t offset = 0;
    for (const TensorSpec& tensor : dense_.bucket.layout.tensors) {
      const auto state = states_.find(tensor.name);
      for (uint64_t i = 0; i < tensor.Elems(); ++i) {
        const float left = state == states_.end() ? 0 : state->second->residual[i];
        const float expected = gradient_[offset + i];
        const float got = result_[offset + i];
        const float allowed = kAllowed * (std::abs(got) + std::abs(left) + std::abs(expected));
        // Not >, so that NaN is wrong as well.
        if (!(std::abs(got + left - expected) <= allowed + wire_error_ * std::abs(expected))) {
          return absl::DataLossError(absl::StrCat("gradient '", tensor.name, "', element ", i,
                                                  ": the result ", got, " and what is left, ", left,
                                                  ", should give ", expected));
        }
      }
      offset += tensor.Elems();
    }
    return absl::OkStatus();
  }

  // Copies the gradients once, over the result, in one piece for each thread: memcpy writes past
  // the caches only when it gets much at a time, and is the slower by a third when it does not.
  absl::StatusOr<double> Copy() {
    const TimePoint start = Now();
    const uint64_t elems = gradient_.size();
    const uint64_t piece = (elems + threads_ - 1) / threads_;
    THALWEG_RETURN_IF_ERROR(pool_.Run(threads_, [&](uint32_t thread) {
      const uint64_t begin = std::min(elems, thread * piece);
      const uint64_t count = std::min(piece, elems - begin);
      std::memcpy(result_.data() + begin, gradient_.data() + begin, count * sizeof(float));
      return absl::OkStatus();
    }));
    return ToSeconds(Now() - start);
  }

 private:
  Rounds(const BucketLayout& layout, const CodecSpec& spec, uint32_t threads)
      : dense_(BucketId{}, layout, FormatOf(DenseType(layout.dtype, spec)), kChunkBytes, 1),
        // What is not compressed loses the digits that the wire's type does not have.
        wire_error_(spec.wire == DType::kFloat32 ? 0.0f : 0x1p-8f),
        threads_(threads),
        pool_(threads),
        gradient_(layout.Elems()),
        result_(layout.Elems()) {
    SeedDirection({.seed = 1}, gradient_);
  }

  // The mean over one node is its own share, which crosses the network in the wire's type.
  absl::Status Exchange(Part& part) {
    const Payload sent({part.send, part.WireBytes()}, nullptr);
    return device_.Decode(sent, part.WireType(), part.bucket.layout.dtype, part.Elems(),
                          part.receive);
  }

  const Part dense_;
  const float wire_error_;
  const uint32_t threads_;
  CpuDevice device_;
  FoldPool pool_;
  MatrixStates states_;
  std::unique_ptr<PowerSgd> codec_;
  std::vector<float> gradient_;
  std::vector<float> result_;
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
  THALWEG_ASSIGN_OR_RETURN(const CodecSpec spec, CodecSpec::Parse(codec));
  uint32_t threads = 0;
  if (!absl::SimpleAtoi(threads_text, &threads) || threads < 1 || threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("THREADS is '", threads_text, "', expected a number from 1 to ", kMaxThreads));
  }
  THALWEG_ASSIGN_OR_RETURN(const BucketLayout layout, ReadShapes(std::cin));
  THALWEG_ASSIGN_OR_RETURN(const auto rounds, Rounds::Create(layout, spec, threads));
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
