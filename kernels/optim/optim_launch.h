// This header connects optim_cuda.cc, which checks arguments, and the kernels of the optimizers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch/host_device.h"
#include "kernels/launch/stream.h"
#include "kernels/optim/factors_scalar.h"
#include "kernels/optim/flat_index.h"
#include "kernels/optim/update_scalar.h"

namespace thalweg {

enum class ElementType : uint8_t { kFp32, kFp16, kBFloat16 };

// Marks tensors whose arrays lie at different distances from multiples of 16 bytes.
inline constexpr uint8_t kNoPacks = 0xff;

// A plan's table has one entry for each tensor. Granules of all tensors are numbered one after the
// other.
struct alignas(16) OptimEntry {
  uint64_t first_granule;
  uint64_t elems;
  void* param;
  const void* grad;
  float* states[3];
  void* copy;
  float* step;
  uint32_t group;
  ElementType param_type;
  ElementType grad_type;
  ElementType copy_type;
  uint8_t head;  // elements before the first multiple of 16 bytes in all arrays; or kNoPacks
};

struct OptimTable {
  const OptimEntry* entries = nullptr;
  uint64_t count = 0;
  uint64_t granules = 0;
};

// A Granule is `count` elements, at most kGranule, of tensor number `tensor` from `first` on.
struct Granule {
  uint64_t tensor;
  uint64_t first;
  uint32_t count;
};

// Returns a granule by its number among those of all tensors, which must be below table.granules.
THALWEG_DEVICE inline Granule GranuleAt(const OptimTable& table, uint64_t number) {
  uint64_t low = 0;
  uint64_t high = table.count;
  // Of tensors without elements and the one behind them, which begin with the same number, the last
  // is wanted.
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    if (table.entries[middle].first_granule <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const OptimEntry& tensor = table.entries[low];
  const uint64_t first = (number - tensor.first_granule) * kGranule;
  const uint64_t left = tensor.elems - first;
  return {low, first, static_cast<uint32_t>(left < kGranule ? left : kGranule)};
}

// LambPrepared is a tensor's data for LAMB's phases.
struct LambPrepared {
  LambFactors factors;
  float rate;       // lr, later times the trust ratio
  bool is_trusted;  // whether there is a ratio
};

// A workspace has two sums for each granule, the word that says to skip the step, and the prepared
// data of each tensor.
inline constexpr uint64_t kSkipBytes = 16;
inline constexpr uint64_t kPreparedBytes = 48;
static_assert(sizeof(AdamFactors) <= kPreparedBytes && sizeof(SgdFactors) <= kPreparedBytes &&
              sizeof(LambPrepared) <= kPreparedBytes);

struct PrepareInputs {
  const float* grad_scale;
  const float* found_inf;
  const double* grad_squares;
};

// `prepared` has one element for each tensor.
template <class Settings, class Prepared>
struct PrepareWork {
  OptimTable table;
  const Settings* settings;
  PrepareInputs inputs;
  uint32_t* skip;
  Prepared* prepared;
};

template <class Prepared>
struct StepWork {
  OptimTable table;
  const uint32_t* skip;
  const Prepared* prepared;
};

// Both arrays have one sum for each granule.
struct LambMomentsWork {
  StepWork<LambPrepared> step;
  double* param_squares;
  double* update_squares;
};

struct TrustWork {
  OptimTable table;
  const uint32_t* skip;
  LambPrepared* prepared;
  const double* param_squares;
  const double* update_squares;
};

// `found_inf` may be null.
struct TotalWork {
  const double* sums;
  uint64_t count;
  double* total;
  float* found_inf;
};

// Launches the sums: sums[g] is that of granule g's squared gradients.
LaunchError LaunchGradSquares(CudaStream stream, const OptimTable& table, double* sums);
LaunchError LaunchTotal(CudaStream stream, const TotalWork& work);

// Settings and Prepared are those of Adam, SGD or LAMB, with AdamFactors, SgdFactors or
// LambPrepared.
template <class Settings, class Prepared>
LaunchError LaunchPrepare(CudaStream stream, const PrepareWork<Settings, Prepared>& work);

LaunchError LaunchAdamStep(CudaStream stream, const StepWork<AdamFactors>& work);
LaunchError LaunchSgdStep(CudaStream stream, const StepWork<SgdFactors>& work);
LaunchError LaunchLambMoments(CudaStream stream, const LambMomentsWork& work);
LaunchError LaunchTrust(CudaStream stream, const TrustWork& work);
LaunchError LaunchLambStep(CudaStream stream, const StepWork<LambPrepared>& work);

}  // namespace thalweg
