// gpu_path_worker SOCKET RANK WORKERS CODEC ELEMS ROUNDS: reduces gradients of MadeGradient(),
// prints the path they took, and writes what its stream has seen of the last result to standard
// output.
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
  const uint32_t rank = Number(argv[2]);
  const uint64_t elems = Number(argv[5]);
  THALWEG_ASSIGN_OR_RETURN(const auto worker,
                           GpuWorker::Connect(argv[1], rank, Number(argv[3]), argv[4], elems));
  for (uint64_t round = 1; round <= Number(argv[6]); ++round) {
    THALWEG_RETURN_IF_ERROR(worker->Fill(MadeGradient(rank, round, elems)));
    THALWEG_RETURN_IF_ERROR(worker->Reduce());
    THALWEG_RETURN_IF_ERROR(worker->Fetch());
    THALWEG_RETURN_IF_ERROR(worker->Finish());
  }
  std::fprintf(stderr, "path %s\n", Name(worker->path()));
  if (std::fwrite(worker->host(), 1, worker->bytes(), stdout) != worker->bytes()) {
    return absl::InternalError("cannot write");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: gpu_path_worker SOCKET RANK WORKERS CODEC ELEMS ROUNDS\n");
    return 2;
  }
  const absl::Status status = thalweg::Work(argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "gpu_path_worker: %s\n", std::string(status.message()).c_str());
  return 1;
}
