// CudaMemory is a bucket's memory on the node's GPUs.
//
//   workers' streams ─events─▶ fold → a codec's kernels → payloads to the host → network
//   workers' streams ◀─event── result ◀── a codec's kernels ◀── payloads from the host ◀──┘
//
// Everything between the events is queued in the order of the round, on the stream of the bucket's
// lane on one GPU, its home, so that the host waits only for what it sends. With workers on several
// GPUs, each GPU first folds its own workers' shares, and NCCL sums them at the home and
// distributes the result. Homes differ between buckets, so that the work is spread over the GPUs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/device/device_group.h"
#include "server/sidecar/cuda/gpu_lane.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

class CudaDevice;

class CudaMemory final : public BucketMemory {
 public:
  // `device` must outlive it.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Create(CudaDevice& device,
                                                            const MemoryTerms& terms);

  absl::Status AddInput(uint32_t local_rank, UniqueFd fd, const DeviceMemory& memory) override;
  bool HasInput(uint32_t local_rank) const override { return inputs_[local_rank].has_value(); }
  void DropInput(uint32_t local_rank) override;
  uint32_t WaitInput(uint32_t local_rank, uint32_t chunks, TimePoint deadline) const override;
  absl::Status Check() const override;
  std::vector<const void*> Shares(uint64_t begin) const override;
  BucketArena& result() override { return progress_; }
  const BucketArena& result() const override { return progress_; }
  DeviceMemory ResultFor(uint32_t local_rank) const override;
  absl::Status BeginRound() override;
  absl::Status EndRound() override;

  std::unique_ptr<DenseCodec> MakeCast(TensorSet tensors, const CodecPlace& place, uint32_t number,
                                       DType wire) override;
  absl::StatusOr<std::unique_ptr<BucketCodec>> MakeLossy(TensorSet tensors, const CodecPlace& place,
                                                         uint32_t number, const CodecSpec& spec,
                                                         ParameterStates& states) override;
  absl::StatusOr<std::unique_ptr<BucketCodec>> MakePowerSgd(TensorSet tensors,
                                                            const CodecPlace& place,
                                                            uint32_t number, DType dense,
                                                            const CodecSpec& spec,
                                                            ParameterStates& states) override;

  // These are for codecs, from the first round on: where they work, and where the result belongs.
  GpuLane& home() const { return *gpus_[home_]->lane; }
  std::byte* home_result() const { return gpus_[home_]->result.memory; }
  DType share() const { return terms_.share; }

 private:
  // An OnGpu is what the bucket has on one GPU.
  struct OnGpu {
    std::unique_ptr<GpuLane> lane;
    std::unique_ptr<GpuLane> arrivals;  // only records when shares are there
    GpuLane::Shared result;
    // With several GPUs: the sum of this GPU's shares (at home, of all), and a counter.
    std::byte* sum = nullptr;
    std::byte* nonfinite = nullptr;
  };
  struct Input {
    OnGpu* gpu = nullptr;
    GpuLane::Shared share;
    StreamProgress* arrived = nullptr;
    bool is_dropped = false;  // `share` is closed; only the worker's own thread reads this
  };

  CudaMemory(CudaDevice& device, const MemoryTerms& terms, BucketArena progress);
  // Returns the entry of the GPU with that UUID; makes its lanes and its result if it is new.
  absl::StatusOr<OnGpu*> UseGpu(const std::string& uuid);
  absl::Status ExpectShares();
  // Runs in the first round, when it is known which GPUs the workers use.
  absl::Status FormGroup();
  absl::Status SumAtHome();

  CudaDevice& device_;
  const MemoryTerms terms_;
  BucketArena progress_;  // has no payload
  std::vector<std::unique_ptr<OnGpu>> gpus_;
  size_t home_ = 0;                           // index in gpus_
  std::shared_ptr<DeviceGroup> group_;        // null with one GPU
  std::vector<std::optional<Input>> inputs_;  // by local rank
};

}  // namespace thalweg
