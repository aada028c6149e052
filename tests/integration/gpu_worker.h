// GpuWorker is a worker of a node with its gradients on GPU 0, for programs that run it in a
// process of its own: CUDA's handles work only in other processes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/session.h"

namespace thalweg {

// A GpuWorker has one bucket of floats and one stream. Only one thread may use it.
class GpuWorker {
 public:
  // A Place says which of all workers it is; `workers` are a node's.
  struct Place {
    uint32_t nodes = 1;
    uint32_t workers = 1;
    uint32_t rank = 0;
  };
  static constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

  static absl::StatusOr<std::unique_ptr<GpuWorker>> Connect(const std::string& socket,
                                                            const Place& place,
                                                            const std::string& codec,
                                                            const BucketLayout& layout);

  // Each queues one step: `values` become the gradient; the gradient is copied to `host()`; the
  // gradient is copied on the device.
  absl::Status Fill(const std::vector<float>& values);
  absl::Status Fetch();
  absl::Status Copy();
  // Queues the reduction of the gradient, and returns when only the stream still has to wait for
  // the result. `call`, unless null, receives the time of the submission.
  absl::Status Reduce(Duration* call = nullptr);
  // Waits until the stream has done what is queued.
  absl::Status Finish();

  const std::byte* host() const { return host_; }
  size_t bytes() const { return bytes_; }
  GradientPath path() const { return session_->stats().path; }

 private:
  explicit GpuWorker(uint64_t elems) : bytes_(elems * sizeof(float)) {}
  absl::Status Allocate();

  const size_t bytes_;
  std::shared_ptr<DeviceRuntime> gpu_;
  std::byte* memory_ = nullptr;
  std::byte* other_ = nullptr;  // of the same size
  std::byte* host_ = nullptr;
  DeviceStream stream_ = nullptr;
  std::unique_ptr<Session> session_;
};

}  // namespace thalweg
