// DeviceWorker is a worker whose gradients are in the memory of a fake device.
#pragma once

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "core/device/fake_runtime.h"
#include "tests/integration/cluster.h"

namespace thalweg {

// Like torch, it computes gradients on one stream, which also waits for the results.
class DeviceWorker {
 public:
  // Connects; must be called for all workers at once.
  DeviceWorker(SessionOptions options, std::shared_ptr<FakeRuntime> device)
      : device_(std::move(device)) {
    options.device = device_;
    if (!device_->BindThread().ok()) std::abort();
    session_ = Session::Connect(options);
    if (session_.ok()) stream_ = *device_->CreateStream();
  }

  Session& session() { return **session_; }
  absl::Status connected() const { return session_.status(); }
  FakeRuntime& device() { return *device_; }
  // Streams are numbered in the order in which a session makes them.
  DeviceStream out() { return device_->stream(0); }
  DeviceStream in() { return device_->stream(2); }
  DeviceStream stream() { return stream_; }

  // Announces bucket 0 with another layout of as many elements.
  absl::Status Recut(const BucketLayout& layout) {
    if (!device_->BindThread().ok()) std::abort();
    ++id_.generation;
    return session().RegisterBucket(id_, layout);
  }
  // Makes the gradient of a round, reduces it and returns what the stream sees of the result after
  // its wait. Uses only bucket 0.
  std::future<Outcome> Reduce(const std::vector<float>& gradient, DType dtype = DType::kFloat32) {
    if (!device_->BindThread().ok()) std::abort();
    if (memory_.empty() && !gradient.empty()) memory_ = device_->Allocate(gradient.size() * 4);
    const auto inside = gradient.empty() ? memory_ : device_->Inside(memory_);
    device_->Run(stream_, [inside, gradient] {
      std::memcpy(inside.data(), gradient.data(), inside.size());
    });
    auto seen = std::make_shared<std::promise<Outcome>>();
    session().SubmitFromDevice(
        id_, {memory_, stream_, owner_}, {},
        [this, seen, inside](const absl::StatusOr<ReducedBucket>& reduced) {
          const absl::Status status =
              reduced.ok() ? device_->Wait(stream_, reduced->arrived) : reduced.status();
          if (!status.ok()) return seen->set_value(status);
          device_->Run(stream_, [seen, inside] {
            seen->set_value(std::vector<std::byte>(inside.begin(), inside.end()));
          });
          // This leaves the session's thread as foreign code may leave it.
          elsewhere_.BindThread().IgnoreError();
        });
    return seen->get_future();
  }

 private:
  FakeRuntime elsewhere_;
  const std::shared_ptr<FakeRuntime> device_;
  absl::StatusOr<std::unique_ptr<Session>> session_;
  DeviceStream stream_ = nullptr;
  std::span<std::byte> memory_;
  BucketId id_;
  const std::shared_ptr<int> owner_ = std::make_shared<int>();
};

// Connects a worker for each rank, with a device of its own.
inline std::vector<std::unique_ptr<DeviceWorker>> ConnectDevices(
    Cluster& cluster, const std::function<void(SessionOptions&)>& edit = {}) {
  std::vector<std::future<std::unique_ptr<DeviceWorker>>> pending;
  for (uint32_t rank = 0; rank < cluster.world_size(); ++rank) {
    SessionOptions options = cluster.OptionsFor(rank);
    if (edit) edit(options);
    pending.push_back(std::async(std::launch::async, [options] {
      return std::make_unique<DeviceWorker>(options, std::make_shared<FakeRuntime>());
    }));
  }
  std::vector<std::unique_ptr<DeviceWorker>> workers;
  for (auto& worker : pending) workers.push_back(worker.get());
  return workers;
}

}  // namespace thalweg
