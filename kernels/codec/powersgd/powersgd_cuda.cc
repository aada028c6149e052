#include "kernels/codec/powersgd/powersgd_cuda.h"

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/codec/powersgd/powersgd_launch.h"
#include "kernels/launch/status.h"

namespace thalweg {
namespace {

absl::Status Check(const PowerSgdMemory& memory) {
  const auto past = reinterpret_cast<uintptr_t>(memory.table) % alignof(PowerSgdMatrix);
  if (past == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "device PowerSGD: expected the plan's table at a multiple of ", alignof(PowerSgdMatrix),
      " bytes, got one ", past, " bytes behind; copy it to memory of its own"));
}

const PowerSgdMatrix* MatricesIn(const PowerSgdMemory& memory) {
  return reinterpret_cast<const PowerSgdMatrix*>(memory.table);
}

PowerSgdTable RowTiles(const PowerSgdPlan& plan, const PowerSgdMemory& memory) {
  const PowerSgdMatrix* const matrices = MatricesIn(memory);
  return {matrices, reinterpret_cast<const PowerSgdTile*>(matrices + plan.matrices())};
}

PowerSgdTable ColumnTiles(const PowerSgdPlan& plan, const PowerSgdMemory& memory) {
  const PowerSgdTable rows = RowTiles(plan, memory);
  return {rows.matrices, rows.tiles + plan.row_tiles()};
}

}  // namespace

absl::Status OrthogonaliseColumnsOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                          const PowerSgdMemory& memory, double epsilon, float* p,
                                          uint32_t* zeroed, uint64_t* nonfinite) {
  THALWEG_RETURN_IF_ERROR(Check(memory));
  return LaunchStatus(LaunchOrthogonalise(stream, plan.matrices(),
                                          {MatricesIn(memory), memory.workspace, p,
                                           /*are_rows=*/false, epsilon, zeroed, nonfinite}),
                      "device orthogonalisation of PowerSGD's P");
}

absl::Status OrthogonaliseRowsOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                       const PowerSgdMemory& memory, double epsilon, float* q,
                                       uint32_t* zeroed, uint64_t* nonfinite) {
  THALWEG_RETURN_IF_ERROR(Check(memory));
  return LaunchStatus(LaunchOrthogonalise(stream, plan.matrices(),
                                          {MatricesIn(memory), memory.workspace, q,
                                           /*are_rows=*/true, epsilon, zeroed, nonfinite}),
                      "device orthogonalisation of PowerSGD's Q");
}

absl::Status AddErrorAndProjectOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                        const PowerSgdMemory& memory, const float* gradient,
                                        float* error, const float* q, float* p,
                                        uint64_t* nonfinite) {
  THALWEG_RETURN_IF_ERROR(Check(memory));
  return LaunchStatus(LaunchProject(stream, plan.row_tiles(),
                                    {RowTiles(plan, memory), gradient, error, q, p, nonfinite}),
                      "device pass 1 of PowerSGD");
}

absl::Status ProjectTransposedOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                       const PowerSgdMemory& memory, const float* x, const float* p,
                                       float* q) {
  THALWEG_RETURN_IF_ERROR(Check(memory));
  return LaunchStatus(
      LaunchTransposed(stream, plan.column_tiles(), {ColumnTiles(plan, memory), x, p, q}),
      "device pass 2 of PowerSGD");
}

absl::Status ReconstructOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                 const PowerSgdMemory& memory, const float* p, const float* q,
                                 float* error, float* out, uint64_t* nonfinite) {
  THALWEG_RETURN_IF_ERROR(Check(memory));
  return LaunchStatus(LaunchReconstruct(stream, plan.row_tiles(),
                                        {RowTiles(plan, memory), p, q, error, out, nonfinite}),
                      "device pass 3 of PowerSGD");
}

absl::Status RestoreErrorOnDevice(CudaStream stream, const PowerSgdPlan& plan,
                                  const PowerSgdMemory& memory, const float* gradient,
                                  float* error) {
  THALWEG_RETURN_IF_ERROR(Check(memory));
  return LaunchStatus(
      LaunchRestore(stream, plan.row_tiles(), {RowTiles(plan, memory), gradient, error}),
      "device restoring of PowerSGD's error");
}

}  // namespace thalweg
