#include "kernels/cast/cast_cuda.h"

#include "absl/strings/str_cat.h"
#include "kernels/cast/cast_launch.h"
#include "kernels/cast/element.h"
#include "kernels/launch/status.h"

namespace thalweg {
namespace {

using Launcher = LaunchError (*)(CudaStream, const void*, void*, uint64_t);

Launcher LauncherFor(DType from, DType to) {
  if (from == DType::kFloat32 && to == DType::kFloat16) return &LaunchCast<Fp32, Fp16>;
  if (from == DType::kFloat32 && to == DType::kBFloat16) return &LaunchCast<Fp32, BFloat16>;
  if (from == DType::kFloat16 && to == DType::kFloat32) return &LaunchCast<Fp16, Fp32>;
  if (from == DType::kBFloat16 && to == DType::kFloat32) return &LaunchCast<BFloat16, Fp32>;
  return nullptr;
}

}  // namespace

absl::Status CastOnDevice(CudaStream stream, DType from, const void* in, DType to, void* out,
                          uint64_t elems) {
  if (from == to && IsValid(from)) {
    return LaunchStatus(LaunchCopy(stream, in, out, elems * SizeOf(from)), "device copy");
  }
  const Launcher launch = LauncherFor(from, to);
  if (launch == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("device cast: expected equal types, or fp32 and fp16 or bf16, got ",
                     Name(from), " to ", Name(to)));
  }
  return LaunchStatus(launch(stream, in, out, elems), "device cast");
}

}  // namespace thalweg
