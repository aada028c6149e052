#include "kernels/codec/block_cuda.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/codec/block_launch.h"
#include "kernels/launch/status.h"

namespace thalweg {
namespace {

absl::StatusOr<BlockLaunches> LaunchesOf(WireFormat format) {
  switch (format) {
#define THALWEG_LAUNCHES_CASE(Name, ...) \
  case WireFormat::k##Name:              \
    return Name##Launches();
    THALWEG_BLOCK_FORMATS(THALWEG_LAUNCHES_CASE)
#undef THALWEG_LAUNCHES_CASE
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("expected a format of blocks, got ", Name(format)));
  }
}

}  // namespace

absl::Status EncodeBlocksOnDevice(CudaStream stream, WireFormat format, const float* values,
                                  float* residual, uint64_t elems, std::byte* out,
                                  uint64_t* nonfinite) {
  THALWEG_ASSIGN_OR_RETURN(const BlockLaunches launches, LaunchesOf(format));
  return LaunchStatus(launches.encode(stream, {values, residual, elems, out, nonfinite}),
                      absl::StrCat("device encode of ", Name(format)));
}

absl::Status DecodeBlocksOnDevice(CudaStream stream, WireFormat format, const std::byte* in,
                                  uint64_t elems, float* decoded) {
  THALWEG_ASSIGN_OR_RETURN(const BlockLaunches launches, LaunchesOf(format));
  return LaunchStatus(launches.decode(stream, {in, elems, decoded}),
                      absl::StrCat("device decode of ", Name(format)));
}

}  // namespace thalweg
