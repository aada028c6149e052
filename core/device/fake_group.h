// A DeviceGroup among FakeRuntimes: what is queued begins when all members' streams have got there,
// as with NCCL, and never while the test says that it hangs.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device/device_group.h"
#include "core/device/fake_runtime.h"

namespace thalweg {

// Sums in the group's order, rounding each sum to the type. Thread-safe. The devices must outlive
// what is queued.
class FakeGroup final : public DeviceGroup {
 public:
  explicit FakeGroup(std::vector<FakeRuntime*> gpus);
  ~FakeGroup() override;

  absl::Status Reduce(std::span<const Member> members, size_t root, DType dtype,
                      uint64_t elems) override;
  absl::Status Broadcast(std::span<const Member> members, size_t root, uint64_t bytes) override;
  absl::Status Check() override;
  void Fail(const absl::Status& why) override;
  void Abort() override;

  // The next call fails with `error`.
  void FailCall(absl::Status error);
  // What has not begun does not begin, and nobody says why.
  void Hang();

  // Of all calls that have queued something, in order.
  std::vector<size_t> roots();
  std::vector<std::string> violations();

 private:
  struct Shared;
  struct Operation;
  // By what kernels see of the members' memory.
  using Body = std::function<void(const std::vector<std::byte*>&)>;
  absl::Status Queue(std::span<const Member> members, size_t root, uint64_t bytes, Body body);

  // Also of what is queued.
  const std::shared_ptr<Shared> shared_;
};

}  // namespace thalweg
