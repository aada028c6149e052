// These benchmarks compare PowerSGD of all matrices of a model in one bucket with a copy
// (bench_device.h): each pass, and a whole round of one node.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/status_macros.h"
#include "kernels/codec/powersgd/bench_models.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "kernels/codec/powersgd/powersgd_cuda.h"
#include "kernels/cuda/bench_device.h"

namespace thalweg {
namespace {

// The layers of the encoder and the pooler; embeddings are not compressed by default.
constexpr Matrices kBertLarge[] = {{1024, 1024, 97}, {4096, 1024, 24}, {1024, 4096, 24}};

std::vector<float> RandomFloats(uint64_t elems) {
  std::vector<float> values(elems);
  SeedDirection({.seed = elems}, values);
  return values;
}

// A Model has all matrices of a model in one bucket.
class Model {
 public:
  Model(std::span<const Matrices> kinds, size_t rank) : Model(Place(kinds, rank)) {}

  absl::Status OrthogonaliseQ(CudaStream stream) const {
    return OrthogonaliseRowsOnDevice(stream, plan_, memory(), 0, q_.get(), zeroed_.get(),
                                     nonfinite_.get());
  }
  absl::Status Pass1(CudaStream stream) const {
    return AddErrorAndProjectOnDevice(stream, plan_, memory(), gradient_.get(), error_.get(),
                                      q_.get(), p_.get(), nonfinite_.get());
  }
  absl::Status OrthogonaliseP(CudaStream stream) const {
    return OrthogonaliseColumnsOnDevice(stream, plan_, memory(), 0, p_.get(), zeroed_.get(),
                                        nonfinite_.get());
  }
  absl::Status Pass2(CudaStream stream) const {
    return ProjectTransposedOnDevice(stream, plan_, memory(), error_.get(), p_.get(), q_.get());
  }
  absl::Status Pass3(CudaStream stream) const {
    return ReconstructOnDevice(stream, plan_, memory(), p_.get(), q_.get(), error_.get(),
                               gradient_.get(), nonfinite_.get());
  }
  absl::Status Round(CudaStream stream) const {
    THALWEG_RETURN_IF_ERROR(OrthogonaliseQ(stream));
    THALWEG_RETURN_IF_ERROR(Pass1(stream));
    THALWEG_RETURN_IF_ERROR(OrthogonaliseP(stream));
    THALWEG_RETURN_IF_ERROR(Pass2(stream));
    return Pass3(stream);
  }

  uint64_t gradient_bytes() const { return gradient_.bytes(); }
  uint64_t p_bytes() const { return p_.bytes(); }
  uint64_t q_bytes() const { return q_.bytes(); }

 private:
  struct Placed {
    std::vector<PlacedMatrix> matrices;
    uint64_t elems = 0;
    uint64_t p_elems = 0;
    uint64_t q_elems = 0;
  };

  static Placed Place(std::span<const Matrices> kinds, size_t rank) {
    Placed placed;
    for (const auto& [rows, cols, count] : kinds) {
      const FactorShape shape = {rows, cols, FactorRank(rows, cols, rank)};
      for (size_t i = 0; i < count; ++i) {
        placed.matrices.push_back({shape, placed.elems, placed.p_elems, placed.q_elems});
        placed.elems += rows * cols;
        placed.p_elems += rows * shape.rank;
        placed.q_elems += cols * shape.rank;
      }
    }
    return placed;
  }

  explicit Model(const Placed& placed)
      : plan_(PowerSgdPlan::Make(placed.matrices).value()),
        gradient_(RandomFloats(placed.elems)),
        error_(placed.elems),
        p_(placed.p_elems),
        q_(RandomFloats(placed.q_elems)),
        nonfinite_(1),
        zeroed_(plan_.columns()),
        table_(plan_.table()),
        workspace_(plan_.workspace_bytes() / sizeof(double)) {}

  PowerSgdMemory memory() const { return {table_.get(), workspace_.get()}; }

  const PowerSgdPlan plan_;
  const DeviceArray<float> gradient_;
  const DeviceArray<float> error_;
  const DeviceArray<float> p_;
  const DeviceArray<float> q_;
  const DeviceArray<uint64_t> nonfinite_;
  const DeviceArray<uint32_t> zeroed_;
  const DeviceArray<std::byte> table_;
  const DeviceArray<double> workspace_;
};

void BenchModel(Bench& bench, const std::string& model_name, std::span<const Matrices> kinds,
                size_t rank) {
  const Model model(kinds, rank);
  const std::string name = model_name + " rank " + std::to_string(rank) + " ";
  const uint64_t whole = model.gradient_bytes();
  const uint64_t factors = model.p_bytes() + model.q_bytes();
  const auto run = [&](const char* what, uint64_t bytes, auto work) {
    bench.Run(name + what, bytes, [&](CudaStream stream) { return (model.*work)(stream); });
  };
  run("orthogonalise Q", 2 * model.q_bytes(), &Model::OrthogonaliseQ);
  run("pass 1", 3 * whole + factors, &Model::Pass1);
  run("orthogonalise P", 2 * model.p_bytes(), &Model::OrthogonaliseP);
  run("pass 2", whole + factors, &Model::Pass2);
  run("pass 3", 3 * whole + factors, &Model::Pass3);
  run("round", 7 * whole + 5 * factors, &Model::Round);
}

void RunAll(int argc, char** argv) {
  Bench bench(argc, argv);
  for (size_t rank : {1, 2, 4, 8}) BenchModel(bench, "resnet50", kResNet50, rank);
  BenchModel(bench, "bert-large", kBertLarge, 4);
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) { thalweg::RunAll(argc, argv); }
