// FakeGroup is a DeviceGroup of FakeRuntimes: as with NCCL, work begins when all members' streams
// have reached it; it never begins while the test makes the group hang.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device/device_group.h"
#include "core/device/fake_runtime.h"

namespace thalweg {

// It sums in the group's order and rounds each sum to the type. Thread-safe. The devices must
// outlive the queued work.
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

  // Makes the next call fail with `error`.
  void FailCall(absl::Status error);
  // Keeps work that has not begun from beginning, without an error.
  void Hang();

  // Returns the roots of all calls that have queued work, in order.
  std::vector<size_t> roots();
  std::vector<std::string> violations();

 private:
  struct Shared;
  struct Operation;
  // A Body gets the members' memory as kernels see it.
  using Body = std::function<void(const std::vector<std::byte*>&)>;
  absl::Status Queue(std::span<const Member> members, size_t root, uint64_t bytes, Body body);

  // The queued work shares ownership.
  const std::shared_ptr<Shared> shared_;
};

}  // namespace thalweg
