#include "kernels/codec/powersgd/orthogonalise.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "kernels/codec/powersgd/orthogonalise_scalar.h"
#include "kernels/codec/splitmix.h"

namespace thalweg {
namespace {

// A Workspace holds vectors in double, each padded with zeros to whole groups of kDotSums elements.
class Workspace {
 public:
  Workspace(size_t count, size_t length)
      : count_(count),
        padded_((length + kDotSums - 1) / kDotSums * kDotSums),
        elements_(count * padded_) {}

  double* At(size_t index) { return elements_.data() + index * padded_; }

  // Orthonormalises vector `index` against those before it. Returns its norm after projection, or 0
  // when it became zero.
  double Orthonormalise(size_t index);

  size_t count() const { return count_; }

 private:
  double Dot(const double* a, const double* b) const {
    double sums[kDotSums] = {};
    for (size_t i = 0; i < padded_; i += kDotSums) {
      for (size_t lane = 0; lane < kDotSums; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) +
           ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  }

  double Norm(const double* a) const { return std::sqrt(Dot(a, a)); }

  void Subtract(double factor, const double* from, double* to) const {
    for (size_t i = 0; i < padded_; ++i) to[i] -= factor * from[i];
  }

  void Scale(double factor, double* a) const {
    for (size_t i = 0; i < padded_; ++i) a[i] *= factor;
  }

  size_t count_;
  size_t padded_;
  std::vector<double> elements_;
};

double Workspace::Orthonormalise(size_t index) {
  double* vector = At(index);
  const double before = Norm(vector);
  double after = before;
  // The first projection leaves errors of 2^-53 of the previous norm, which may be large compared
  // with what is left; the second projection removes them.
  for (int pass = 0; pass < 2 && index > 0; ++pass) {
    for (size_t k = 0; k < index; ++k) Subtract(Dot(vector, At(k)), At(k), vector);
    after = Norm(vector);
    if (!HasDirection(before, after)) break;
  }
  if (HasDirection(before, after)) {
    Scale(1.0 / after, vector);
    return after;
  }
  std::fill(vector, vector + padded_, 0.0);
  return 0;
}

// Orthonormalises, except that vector k must still be multiplied by (*scales)[k]; returns which
// became zero.
std::vector<size_t> OrthonormaliseAll(Workspace& vectors, double epsilon,
                                      std::vector<double>* scales) {
  std::vector<size_t> zeroed;
  for (size_t k = 0; k < vectors.count(); ++k) {
    const double norm = vectors.Orthonormalise(k);
    scales->push_back(LengthAfter(norm, epsilon));
    if (norm == 0) zeroed.push_back(k);
  }
  return zeroed;
}

// Element i of vector k is at factor[k · vector_stride + i · element_stride].
std::vector<size_t> Orthogonalise(std::span<float> factor, size_t rank, double epsilon,
                                  size_t vector_stride, size_t element_stride) {
  const size_t length = factor.size() / rank;
  Workspace vectors(rank, length);
  for (size_t k = 0; k < rank; ++k) {
    const float* from = factor.data() + k * vector_stride;
    double* to = vectors.At(k);
    for (size_t i = 0; i < length; ++i) to[i] = from[i * element_stride];
  }
  std::vector<double> scales;
  std::vector<size_t> zeroed = OrthonormaliseAll(vectors, epsilon, &scales);
  for (size_t k = 0; k < rank; ++k) {
    const double* from = vectors.At(k);
    float* to = factor.data() + k * vector_stride;
    for (size_t i = 0; i < length; ++i) {
      to[i * element_stride] = static_cast<float>(from[i] * scales[k]);
    }
  }
  return zeroed;
}

}  // namespace

std::vector<size_t> OrthogonaliseColumns(std::span<float> p, size_t rank, double epsilon) {
  assert(rank > 0 && p.size() % rank == 0 && epsilon >= 0);
  return Orthogonalise(p, rank, epsilon, 1, rank);
}

std::vector<size_t> OrthogonaliseRows(std::span<float> q, size_t rank, double epsilon) {
  assert(rank > 0 && q.size() % rank == 0 && epsilon >= 0);
  return Orthogonalise(q, rank, epsilon, q.size() / rank, 1);
}

void SeedDirection(const DirectionSeed& seed, std::span<float> direction) {
  uint64_t key = 0;
  for (uint64_t part : {seed.seed, seed.parameter, seed.column, seed.use}) {
    key = SplitMix(key + kSplitMixStep + SplitMix(part + kSplitMixStep));
  }
  uint64_t counter = key;
  for (float& element : direction) {
    counter += kSplitMixStep;
    // The upper 24 bits as a signed fraction are exact in float32.
    const auto fraction = static_cast<int32_t>(SplitMix(counter) >> 40) - (1 << 23);
    element = static_cast<float>(fraction) * 0x1p-23f;
  }
}

}  // namespace thalweg
