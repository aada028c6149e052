// Threads that wait for gRPC. Each waits on a completion queue of its own, so that what arrives on
// a connection is read, handled and answered by one thread without being handed on: with gRPC's own
// callback threads every event wakes another one (docs/adr/0008-own-poll-threads.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/thread.h"
#include "grpcpp/completion_queue.h"

namespace thalweg {

// What the tags of a Poller's queue point to. Happened is called once for every operation begun
// with it, on the poller's thread, and must not block.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void Happened(bool ok) = 0;
};

// A completion that calls a member function, so that an object can have one per kind of operation.
template <typename Owner, void (Owner::*kMethod)(bool)>
class MemberCompletion final : public Completion {
 public:
  explicit MemberCompletion(Owner& owner) : owner_(owner) {}
  void Happened(bool ok) override { (owner_.*kMethod)(ok); }

 private:
  Owner& owner_;
};

// One thread and its queue. Thread-safe.
class Poller {
 public:
  explicit Poller(std::unique_ptr<grpc::CompletionQueue> queue);
  // Waits for the operations that have been begun. None may be begun from now on, but by these.
  ~Poller();

  grpc::CompletionQueue& queue() { return *queue_; }

 private:
  void Loop();

  const std::unique_ptr<grpc::CompletionQueue> queue_;
  Thread thread_;
};

// The pollers of a process's outgoing connections. Thread-safe. Must outlive the streams that use
// it, and must not be destroyed by one of its own threads.
class ClientPollers {
 public:
  explicit ClientPollers(uint32_t threads);  // ≥ 1

  // For one more connection: the pollers take turns.
  grpc::CompletionQueue& Next();

 private:
  std::vector<std::unique_ptr<Poller>> pollers_;
  std::atomic<size_t> next_{0};
};

}  // namespace thalweg
