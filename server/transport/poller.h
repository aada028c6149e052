// Pollers are the threads that wait for gRPC. Each waits on a completion queue of its own, so that
// one thread reads, handles and answers what arrives on a connection, with no hand-over to another
// thread. gRPC's own callback threads wake another thread for every event
// (docs/adr/0008-own-poll-threads.md).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/clock.h"
#include "core/base/thread.h"
#include "grpcpp/completion_queue.h"

namespace thalweg {

// A cancelled call or stream ends within this time: the network is no longer involved.
constexpr Duration kCancelTime = std::chrono::seconds(10);

// Operations on a Poller's queue are started with the Tag of a Completion. Happened is called once
// for each, on the poller's thread, and must not block.
class Completion {
 public:
  virtual ~Completion() = default;
  // Call it when everything that Happened is to see has been written.
  void* Tag();
  virtual void Happened(bool ok) = 0;
};

// A MemberCompletion calls a member function, so that an object can have one per kind of operation.
template <typename Owner, void (Owner::*kMethod)(bool)>
class MemberCompletion final : public Completion {
 public:
  explicit MemberCompletion(Owner& owner) : owner_(owner) {}
  void Happened(bool ok) override { (owner_.*kMethod)(ok); }

 private:
  Owner& owner_;
};

// A Poller is one thread and its queue. It is thread-safe.
class Poller {
 public:
  // A Working exists while a completion does what may take long, such as a fold. It must be made
  // and destroyed on one thread; on one that is no poller's it means nothing.
  class Working {
   public:
    Working();
    ~Working();
    Working(const Working&) = delete;
    Working& operator=(const Working&) = delete;

   private:
    Poller* const poller_;
  };

  explicit Poller(std::unique_ptr<grpc::CompletionQueue> queue);
  // Waits for the operations in flight. From now on only their completions may start another one.
  ~Poller();

  grpc::CompletionQueue& queue() { return *queue_; }
  // Returns how many completions the thread has handled.
  uint64_t handled() const { return handled_.load(std::memory_order_relaxed); }
  // Returns whether there is a Working. When it has ended, handled() has grown.
  bool is_working() const { return is_working_.load(std::memory_order_acquire); }
  // Returns the processor time that the thread has used.
  Duration ProcessorTime() { return thread_.ProcessorTime(); }

 private:
  void Loop();

  const std::unique_ptr<grpc::CompletionQueue> queue_;
  std::atomic<uint64_t> handled_{0};
  std::atomic<bool> is_working_{false};
  Thread thread_;
};

// Pollers are the pollers that connections share. They are thread-safe, must outlive the streams
// that use them, and must not be destroyed by one of their own threads.
class Pollers {
 public:
  // Requires a queue at least. Those of a server, which must outlive them and be shut down before
  // they are destroyed, serve outgoing connections too.
  explicit Pollers(std::vector<std::unique_ptr<grpc::CompletionQueue>> queues);
  // Starts `threads` pollers, 1 at least, with queues for outgoing connections only.
  explicit Pollers(uint32_t threads);

  // Returns the queue for one more connection; the pollers take turns.
  grpc::CompletionQueue& Next();
  const std::vector<std::unique_ptr<Poller>>& all() { return pollers_; }

 private:
  std::vector<std::unique_ptr<Poller>> pollers_;
  std::atomic<size_t> next_{0};
};

}  // namespace thalweg
