// These benchmarks run PowerSGD on all matrices of ResNet-50 in one thread, phase after phase as in
// one bucket of all gradients, and a copy. Bytes are counted as read + written: 3 accesses per
// element in passes 1 and 3, 1 in pass 2, times the 4 of a float.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/codec/powersgd/bench_models.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "kernels/codec/powersgd/powersgd.h"

namespace thalweg {
namespace {

class Model {
 public:
  explicit Model(size_t rank) {
    for (const auto& [rows, cols, count] : kResNet50) {
      for (size_t i = 0; i < count; ++i) {
        const FactorShape shape = {rows, cols, FactorRank(rows, cols, rank)};
        matrices_.push_back({shape, elems_, p_elems_, q_elems_});
        elems_ += rows * cols;
        p_elems_ += rows * shape.rank;
        q_elems_ += shape.rank * cols;
      }
    }
    gradient_.resize(elems_);
    q_.resize(q_elems_);
    SeedDirection({.seed = 1}, gradient_);
    SeedDirection({.seed = 2}, q_);
    error_.resize(elems_);
    out_.resize(elems_);
    p_.resize(p_elems_);
  }

  size_t elems() const { return elems_; }

  void AddErrorAndProjectAll() {
    for (const Matrix& m : matrices_) {
      AddErrorAndProject(m.shape, Of(m, gradient_), Of(m, error_), Of(m, error_), OfQ(m), OfP(m));
    }
  }
  void ProjectTransposedAll() {
    for (const Matrix& m : matrices_) {
      ProjectTransposed(m.shape, Of(m, error_), OfP(m), 0, m.shape.cols, OfQ(m));
    }
  }
  void ReconstructAll() {
    for (const Matrix& m : matrices_) {
      Reconstruct(m.shape, OfP(m), OfQ(m), Of(m, error_), Of(m, out_));
    }
  }
  void RestoreErrorAll() {
    for (const Matrix& m : matrices_) RestoreError(Of(m, gradient_), Of(m, error_));
  }
  void OrthogonaliseP() {
    for (const Matrix& m : matrices_) OrthogonaliseColumns(OfP(m), m.shape.rank, 0);
  }
  void OrthogonaliseQ() {
    for (const Matrix& m : matrices_) OrthogonaliseRows(OfQ(m), m.shape.rank, 0);
  }

 private:
  struct Matrix {
    FactorShape shape;
    size_t at;
    size_t p_at;
    size_t q_at;
  };

  static std::span<float> Of(const Matrix& m, std::vector<float>& all) {
    return {all.data() + m.at, m.shape.rows * m.shape.cols};
  }
  std::span<float> OfP(const Matrix& m) {
    return {p_.data() + m.p_at, m.shape.rows * m.shape.rank};
  }
  std::span<float> OfQ(const Matrix& m) {
    return {q_.data() + m.q_at, m.shape.rank * m.shape.cols};
  }

  std::vector<Matrix> matrices_;
  size_t elems_ = 0;
  size_t p_elems_ = 0;
  size_t q_elems_ = 0;
  std::vector<float> gradient_;
  std::vector<float> error_;
  std::vector<float> out_;
  std::vector<float> p_;
  std::vector<float> q_;
};

// The argument is the rank.
template <class Phase>
void Measure(benchmark::State& state, size_t floats_per_elem, Phase phase) {
  Model model(static_cast<size_t>(state.range(0)));
  model.AddErrorAndProjectAll();
  model.OrthogonaliseP();
  for (auto _ : state) {
    phase(model);
    benchmark::ClobberMemory();
  }
  if (floats_per_elem == 0) return;
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(floats_per_elem * model.elems() * sizeof(float)));
}

void BM_AddErrorAndProject(benchmark::State& state) {
  Measure(state, 3, [](Model& model) { model.AddErrorAndProjectAll(); });
}
void BM_ProjectTransposed(benchmark::State& state) {
  Measure(state, 1, [](Model& model) { model.ProjectTransposedAll(); });
}
void BM_Reconstruct(benchmark::State& state) {
  Measure(state, 3, [](Model& model) { model.ReconstructAll(); });
}
void BM_RestoreError(benchmark::State& state) {
  Measure(state, 3, [](Model& model) { model.RestoreErrorAll(); });
}
void BM_Orthogonalise(benchmark::State& state) {
  Measure(state, 0, [](Model& model) {  // memory does not bound it: only its time counts
    model.OrthogonaliseQ();
    model.OrthogonaliseP();
  });
}
void BM_Round(benchmark::State& state) {
  Measure(state, 7, [](Model& model) {
    model.OrthogonaliseQ();
    model.AddErrorAndProjectAll();
    model.OrthogonaliseP();
    model.ProjectTransposedAll();
    model.ReconstructAll();
  });
}

void Ranks(benchmark::internal::Benchmark* bench) {
  bench->Arg(1)->Arg(4)->Unit(benchmark::kMillisecond);
}
BENCHMARK(BM_AddErrorAndProject)->Apply(Ranks);
BENCHMARK(BM_ProjectTransposed)->Apply(Ranks);
BENCHMARK(BM_Reconstruct)->Apply(Ranks);
BENCHMARK(BM_RestoreError)->Arg(4)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Orthogonalise)->Apply(Ranks);
BENCHMARK(BM_Round)->Apply(Ranks)->Arg(2)->Arg(8);

void BM_Memcpy(benchmark::State& state) {
  const std::vector<std::byte> in(static_cast<size_t>(state.range(0)));
  std::vector<std::byte> out(in.size());
  for (auto _ : state) {
    std::memcpy(out.data(), in.data(), in.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * 2 * state.range(0));
}
BENCHMARK(BM_Memcpy)->Arg(100 << 20)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace thalweg
