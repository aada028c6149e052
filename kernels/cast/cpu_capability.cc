#include "kernels/cast/cpu_capability.h"

#include <cstdint>
#include <optional>

#include "absl/strings/str_cat.h"
#include "hwy/highway.h"

namespace thalweg {
namespace {

// The best target that `capability` allows. Of two targets, Highway gives the better one the lower
// bit.
std::optional<int64_t> BestTarget(const std::string& capability) {
  if (capability == "default") return HWY_STATIC_TARGET;
#if HWY_ARCH_X86
  if (capability == "avx2") return HWY_AVX2;
  if (capability == "avx512") return 1;
#endif
  if (capability.empty()) return 1;
  return std::nullopt;
}

}  // namespace

absl::Status LimitCpuCapability(const std::string& capability) {
  const std::optional<int64_t> best = BestTarget(capability);
  if (!best.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("THALWEG_CPU_CAPABILITY is '", capability, "': expected default",
                     HWY_ARCH_X86 ? ", avx2 or avx512" : "", ", or nothing for no limit"));
  }
  hwy::DisableTargets(*best - 1);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return absl::OkStatus();
}

std::string CpuCapability() {
  // The lowest bit among the supported targets is the best one.
  const int64_t supported = hwy::SupportedAndGeneratedTargets().front();
  return hwy::TargetName(supported);
}

}  // namespace thalweg
