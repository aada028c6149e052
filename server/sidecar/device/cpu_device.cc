#include "server/sidecar/device/cpu_device.h"

#include <optional>
#include <utility>

#include "core/base/status_macros.h"
#include "server/sidecar/codec/cast_codec.h"
#include "server/sidecar/codec/cpu_lossy.h"
#include "server/sidecar/codec/cpu_power_sgd.h"

namespace thalweg {
namespace {

class CpuMemory final : public BucketMemory {
 public:
  CpuMemory(const MemoryTerms& terms, BucketArena result)
      : share_(terms.share),
        share_bytes_(terms.layout.Elems() * SizeOf(terms.share)),
        inputs_(terms.local_size),
        result_(std::move(result)) {}

  absl::Status AddInput(uint32_t local_rank, UniqueFd fd, const DeviceMemory& memory) override {
    if (memory != DeviceMemory()) {
      return absl::InvalidArgumentError("expected an arena in host memory, got memory of a GPU");
    }
    THALWEG_ASSIGN_OR_RETURN(inputs_[local_rank], BucketArena::Open(std::move(fd), share_bytes_));
    return absl::OkStatus();
  }
  bool HasInput(uint32_t local_rank) const override { return inputs_[local_rank].has_value(); }
  uint32_t WaitInput(uint32_t local_rank, uint32_t chunks, TimePoint deadline) const override {
    return inputs_[local_rank]->WaitReady(chunks, deadline);
  }
  std::vector<const void*> Shares(uint64_t begin) const override {
    std::vector<const void*> shares;
    shares.reserve(inputs_.size());
    for (const auto& input : inputs_) shares.push_back(input->payload() + begin * SizeOf(share_));
    return shares;
  }
  BucketArena& result() override { return result_; }
  const BucketArena& result() const override { return result_; }
  absl::Status BeginRound() override {
    result_.ResetReady();
    return absl::OkStatus();
  }

  std::unique_ptr<DenseCodec> MakeCast(TensorSet tensors, const CodecPlace& place, uint32_t number,
                                       DType wire) override {
    const bool is_direct = number == 0 && inputs_.size() == 1 && share_ == wire;
    return std::make_unique<CastCodec>(std::move(tensors), InResult(place), number, wire,
                                       is_direct);
  }
  absl::StatusOr<std::unique_ptr<BucketCodec>> MakeLossy(TensorSet tensors, const CodecPlace& place,
                                                         uint32_t number, const CodecSpec& spec,
                                                         ParameterStates& states) override {
    return CpuLossy::Create(std::move(tensors), InResult(place), number, spec, states);
  }
  absl::StatusOr<std::unique_ptr<BucketCodec>> MakePowerSgd(TensorSet tensors,
                                                            const CodecPlace& place,
                                                            uint32_t number, DType dense,
                                                            const CodecSpec& spec,
                                                            ParameterStates& states) override {
    return CpuPowerSgd::Create(std::move(tensors), InResult(place), number, dense, spec, states);
  }

 private:
  CodecPlace InResult(CodecPlace place) {
    place.result = result_.payload();
    return place;
  }

  const DType share_;
  const uint64_t share_bytes_;
  std::vector<std::optional<BucketArena>> inputs_;  // by local rank
  BucketArena result_;
};

}  // namespace

absl::Status CpuDevice::Probe(const DeviceMemory& /*probe*/) {
  return absl::UnimplementedError("the sidecar works in host memory");
}

absl::StatusOr<std::unique_ptr<BucketMemory>> CpuDevice::MakeMemory(const MemoryTerms& terms) {
  const uint64_t bytes = terms.layout.Elems() * SizeOf(terms.layout.dtype);
  THALWEG_ASSIGN_OR_RETURN(BucketArena result, BucketArena::Create("thalweg-result", bytes, true));
  return std::make_unique<CpuMemory>(terms, std::move(result));
}

}  // namespace thalweg
