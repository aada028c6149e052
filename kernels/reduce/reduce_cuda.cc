#include "kernels/reduce/reduce_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cast/element.h"
#include "kernels/launch/status.h"
#include "kernels/reduce/reduce_launch.h"

namespace thalweg {
namespace {

static_assert(kMaxDeviceFoldInputs == kMaxFoldInputs);

using Launcher = LaunchError (*)(CudaStream, const FoldWork&);

Launcher LauncherFor(DType in, DType out_type) {
  if (in == DType::kFloat32 && out_type == DType::kFloat16) return &LaunchFold<Fp32, Fp16>;
  if (in == DType::kFloat32 && out_type == DType::kBFloat16) return &LaunchFold<Fp32, BFloat16>;
  if (in != out_type) return nullptr;
  switch (in) {
    case DType::kFloat32:
      return &LaunchFold<Fp32, Fp32>;
    case DType::kFloat16:
      return &LaunchFold<Fp16, Fp16>;
    case DType::kBFloat16:
      return &LaunchFold<BFloat16, BFloat16>;
    case DType::kFloat64:
      return &LaunchFold<Fp64, Fp64>;
    default:
      return nullptr;  // gradients are floats
  }
}

}  // namespace

absl::Status FoldMeanOnDevice(CudaStream stream, std::span<const void* const> inputs,
                              std::span<const float> weights, float divisor, DType in,
                              DType out_type, void* out, uint64_t elems, uint64_t* nonfinite) {
  if (inputs.empty() || inputs.size() > kMaxDeviceFoldInputs || weights.size() != inputs.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("device fold: expected 1 to ", kMaxDeviceFoldInputs,
                     " inputs and as many weights, got ", inputs.size(), " and ", weights.size()));
  }
  const Launcher launch = LauncherFor(in, out_type);
  if (launch == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("device fold: expected equal types, or fp32 to fp16 or bf16, got ", Name(in),
                     " to ", Name(out_type)));
  }
  FoldWork work;
  std::copy(inputs.begin(), inputs.end(), work.inputs);
  std::copy(weights.begin(), weights.end(), work.weights);
  work.count = static_cast<uint32_t>(inputs.size());
  work.divisor = Divisor(divisor);
  work.out = out;
  work.elems = elems;
  work.nonfinite = nonfinite;
  return LaunchStatus(launch(stream, work), "device fold");
}

}  // namespace thalweg
