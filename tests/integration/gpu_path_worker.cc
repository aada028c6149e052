// gpu_path_worker SOCKET NODES WORKERS RANK CODEC ROWS ROUNDS reduces gradients of MadeGradient(),
// of a square matrix and a vector of three. It writes to standard output a line with their path,
// then what its stream sees of the last result.
#include <cstdio>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "core/base/status_macros.h"
#include "tests/integration/gpu_worker.h"
#include "tests/integration/made_gradient.h"

namespace thalweg {
namespace {

uint32_t Number(const char* text) {
  uint32_t number = 0;
  if (!absl::SimpleAtoi(text, &number)) std::abort();
  return number;
}

absl::Status Work(char** argv) {
  const GpuWorker::Place place = {Number(argv[2]), Number(argv[3]), Number(argv[4])};
  const int64_t rows = Number(argv[6]);
  const BucketLayout layout{DType::kFloat32, {{"w", {rows, rows}}, {"b", {3}}}};
  THALWEG_ASSIGN_OR_RETURN(const auto worker, GpuWorker::Connect(argv[1], place, argv[5], layout));
  for (uint64_t round = 1; round <= Number(argv[7]); ++round) {
    THALWEG_RETURN_IF_ERROR(worker->Fill(MadeGradient(place.rank, round, layout.Elems())));
    THALWEG_RETURN_IF_ERROR(worker->Reduce());
    THALWEG_RETURN_IF_ERROR(worker->Fetch());
    THALWEG_RETURN_IF_ERROR(worker->Finish());
  }
  std::printf("%s\n", Name(worker->path()));
  if (std::fwrite(worker->host(), 1, worker->bytes(), stdout) != worker->bytes()) {
    return absl::InternalError("cannot write");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) {
  if (argc != 8) {
    std::fprintf(stderr, "usage: gpu_path_worker SOCKET NODES WORKERS RANK CODEC ROWS ROUNDS\n");
    return 2;
  }
  const absl::Status status = thalweg::Work(argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "gpu_path_worker: %s\n", std::string(status.message()).c_str());
  return 1;
}
