#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/cleanup/cleanup.h"
#include "core/base/status_macros.h"
#include "kernels/launch/count_launches.h"
#include "kernels/launch/status.h"

namespace thalweg {

absl::StatusOr<uint64_t> CountLaunches(const std::function<absl::Status(CudaStream)>& work) {
  // A separate stream is needed, because the default stream cannot be recorded.
  cudaStream_t stream = nullptr;
  THALWEG_RETURN_IF_ERROR(LaunchStatus(cudaStreamCreate(&stream), "creating a stream"));
  const absl::Cleanup destroy_stream = [stream] { cudaStreamDestroy(stream); };
  THALWEG_RETURN_IF_ERROR(LaunchStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal),
                                       "recording a stream"));
  const absl::Status launched = work(stream);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  const absl::Cleanup destroy_graph = [graph] {
    if (graph != nullptr) cudaGraphDestroy(graph);
  };
  THALWEG_RETURN_IF_ERROR(launched);
  THALWEG_RETURN_IF_ERROR(LaunchStatus(ended, "recording a stream"));
  size_t nodes = 0;
  THALWEG_RETURN_IF_ERROR(
      LaunchStatus(cudaGraphGetNodes(graph, nullptr, &nodes), "counting what was recorded"));
  return nodes;
}

}  // namespace thalweg
