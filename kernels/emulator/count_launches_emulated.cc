#include "core/base/status_macros.h"
#include "kernels/launch/count_launches.h"
#include "kernels/launch/emulator.h"

namespace thalweg {

absl::StatusOr<uint64_t> CountLaunches(const std::function<absl::Status(CudaStream)>& work) {
  const uint64_t before = Emulator::Get().launches();
  THALWEG_RETURN_IF_ERROR(work(nullptr));
  return Emulator::Get().launches() - before;
}

}  // namespace thalweg
