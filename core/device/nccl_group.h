// NcclGroup implements DeviceGroup with NCCL: one process, a communicator with one member per GPU.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/device/device_group.h"
#include "core/device/nccl_library.h"

namespace thalweg {

// An NcclGroup is thread-safe. It makes its calls into NCCL one after the other, so that all
// devices get them in the same order. Calls that may block in NCCL (connecting and taking apart)
// run on a thread of their own: callers wait for it up to the group's patience and then abandon it
// for the rest of the process. At its end a group that has failed is aborted; any other one is
// destroyed.
class NcclGroup final : public DeviceGroup {
 public:
  // Connects the GPUs. DeadlineExceeded: connecting takes longer than `patience`.
  static absl::StatusOr<std::shared_ptr<DeviceGroup>> Create(
      const NcclApi& api, std::vector<std::shared_ptr<DeviceRuntime>> gpus, Duration patience);
  ~NcclGroup() override;

  absl::Status Reduce(std::span<const Member> members, size_t root, DType dtype,
                      uint64_t elems) override;
  absl::Status Broadcast(std::span<const Member> members, size_t root, uint64_t bytes) override;
  absl::Status Check() override;
  void Fail(const absl::Status& why) override;
  void Abort() override;

 private:
  struct State;
  explicit NcclGroup(std::unique_ptr<State> state);
  // Makes one call per member, as one operation.
  absl::Status Queue(const char* call, std::span<const Member> members, size_t root,
                     const std::function<int(const Member&, NcclComm, bool is_root)>& one);

  std::unique_ptr<State> state_;
};

// Opens a group with the library that THALWEG_NCCL_LIBRARY names.
absl::StatusOr<std::shared_ptr<DeviceGroup>> OpenNcclGroup(
    const std::vector<std::shared_ptr<DeviceRuntime>>& gpus, Duration patience);

}  // namespace thalweg
