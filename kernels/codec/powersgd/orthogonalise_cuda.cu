#include <cmath>

#include "kernels/cast/element.h"
#include "kernels/codec/powersgd/orthogonalise_scalar.h"
#include "kernels/codec/powersgd/powersgd_launch.h"
#include "kernels/launch/combine.h"
#include "kernels/launch/launch.h"

namespace thalweg {
namespace {

// A block takes the vectors of one factor. Element i of each belongs to thread i mod kThreads,
// which alone reads and writes it, so vectors need no barriers; only products do.
//
// The order of a sum is that of kernels/codec/powersgd/orthogonalise.cc: kDotSums threads add one
// product after the other. While they add the products of one tile of elements, the block computes
// those of the next; each vector is read once for a subtraction and the following product.
struct OrthogonaliseKernel {
  static constexpr uint32_t kThreads = kPowerSgdThreads;
  static constexpr uint32_t kTile = 2048;
  struct Shared {
    double products[2][kTile];
    double dot;
  };
  using Args = OrthogonaliseWork;

  struct Vectors {
    double* elements;  // vector k from k · length on
    uint64_t length;
    THALWEG_DEVICE double* At(uint32_t k) const { return elements + k * length; }
  };

  template <class Thread>
  THALWEG_DEVICE static void Run(const Thread& thread, Shared& shared, const Args& args) {
    const PowerSgdMatrix& m = args.matrices[thread.Block()];
    const uint64_t length = args.are_rows ? m.cols : m.rows;
    float* const factor = args.factors + (args.are_rows ? m.q_offset : m.p_offset);
    const uint64_t vector_stride = args.are_rows ? length : 1;
    const uint64_t element_stride = args.are_rows ? 1 : m.rank;
    const Vectors vectors = {args.workspace + m.workspace_offset, length};
    uint32_t nonfinite = 0;
    for (uint32_t k = 0; k < m.rank; ++k) {
      for (uint64_t i = thread.Index(); i < length; i += kThreads) {
        const float element = factor[k * vector_stride + i * element_stride];
        if (!IsFinite<Fp32>(BitCast<uint32_t>(element))) ++nonfinite;
        vectors.At(k)[i] = element;
      }
    }
    AddInWarp(thread, nonfinite, args.nonfinite);
    for (uint32_t k = 0; k < m.rank; ++k) {
      const double norm = Project(thread, shared, vectors, k);
      const double length_after = LengthAfter(norm, args.epsilon);
      const double inverse = norm > 0 ? 1.0 / norm : 0.0;
      double* const vector = vectors.At(k);
      for (uint64_t i = thread.Index(); i < length; i += kThreads) {
        vector[i] = norm > 0 ? vector[i] * inverse : 0.0;
        factor[k * vector_stride + i * element_stride] =
            static_cast<float>(vector[i] * length_after);
      }
      if (thread.Index() == 0) args.zeroed[m.first_column + k] = norm > 0 ? 0 : 1;
    }
  }

  // Projects vector `index` out of those before it. Returns its norm, or 0 when it has no direction
  // of its own.
  template <class Thread>
  THALWEG_DEVICE static double Project(const Thread& thread, Shared& shared, const Vectors& vectors,
                                       uint32_t index) {
    double* const vector = vectors.At(index);
    const uint64_t length = vectors.length;
    const double before = std::sqrt(Dot(thread, shared, length, vector, vector, Nothing()));
    double after = before;
    for (int pass = 0; pass < 2 && index > 0; ++pass) {
      double dot = Dot(thread, shared, length, vector, vectors.At(0), Nothing());
      for (uint32_t k = 0; k < index; ++k) {
        const double* const next = k + 1 < index ? vectors.At(k + 1) : vector;
        dot = Dot(thread, shared, length, vector, next, Projection{dot, vectors.At(k)});
      }
      after = std::sqrt(dot);
      if (!HasDirection(before, after)) break;
    }
    return HasDirection(before, after) ? after : 0;
  }

  // The following types are what is subtracted from a vector before a product is taken.
  struct Nothing {
    THALWEG_DEVICE void From(double*, uint64_t) const {}
  };
  struct Projection {
    double factor;
    const double* direction;
    THALWEG_DEVICE void From(double* vector, uint64_t i) const {
      vector[i] -= factor * direction[i];
    }
  };

  template <class Thread, class Subtract>
  THALWEG_DEVICE static double Dot(const Thread& thread, Shared& shared, uint64_t length,
                                   double* vector, const double* other, const Subtract& subtract) {
    const uint64_t tiles = (length + kTile - 1) / kTile;
    double sum = 0;  // number Index()
    for (uint64_t tile = 0; tile <= tiles; ++tile) {
      for (uint32_t i = thread.Index(); i < ElemsOf(tile, length); i += kThreads) {
        const uint64_t at = tile * kTile + i;
        subtract.From(vector, at);
        shared.products[tile % 2][i] = vector[at] * other[at];
      }
      if (tile > 0 && thread.Index() < kDotSums) {
        const double* const products = shared.products[(tile - 1) % 2];
        const uint32_t count = ElemsOf(tile - 1, length);
        for (uint32_t i = thread.Index(); i < count; i += kDotSums) sum += products[i];
      }
      thread.SyncBlock();
    }
    if (thread.Warp() == 0) {
      for (uint32_t half = kDotSums / 2; half > 0; half /= 2) sum += thread.ShuffleXor(sum, half);
      if (thread.Lane() == 0) shared.dot = sum;
    }
    thread.SyncBlock();
    return shared.dot;
  }

  THALWEG_DEVICE static uint32_t ElemsOf(uint64_t tile, uint64_t length) {
    const uint64_t begin = tile * kTile;
    const uint64_t left = begin < length ? length - begin : 0;
    return static_cast<uint32_t>(left < kTile ? left : kTile);
  }
};
static_assert(OrthogonaliseKernel::kTile % kDotSums == 0);

}  // namespace

LaunchError LaunchOrthogonalise(CudaStream stream, uint32_t matrices,
                                const OrthogonaliseWork& work) {
  return Launch<OrthogonaliseKernel>(stream, matrices, work);
}

}  // namespace thalweg
