#include "server/transport/poller.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#include <utility>

namespace thalweg {
namespace {

thread_local Poller* this_threads_poller = nullptr;

// Debian's gRPC is not instrumented, so ThreadSanitizer has to be told that what a thread has done
// before it starts an operation happened before the operation's completion.
#if defined(__SANITIZE_THREAD__)
void NoteStart(Completion* completion) { __tsan_release(completion); }
void NoteEnd(Completion* completion) { __tsan_acquire(completion); }
#else
void NoteStart(Completion* /*completion*/) {}
void NoteEnd(Completion* /*completion*/) {}
#endif

}  // namespace

void* Completion::Tag() {
  NoteStart(this);
  return this;
}

Poller::Working::Working() : poller_(this_threads_poller) {
  if (poller_ != nullptr) poller_->is_working_.store(true, std::memory_order_relaxed);
}

Poller::Working::~Working() {
  if (poller_ == nullptr) return;
  poller_->handled_.fetch_add(1, std::memory_order_relaxed);
  poller_->is_working_.store(false, std::memory_order_release);
}

Poller::Poller(std::unique_ptr<grpc::CompletionQueue> queue)
    : queue_(std::move(queue)), thread_("grpc-poll", [this] { Loop(); }) {}

Poller::~Poller() {
  queue_->Shutdown();
  thread_.Join();
}

void Poller::Loop() {
  this_threads_poller = this;
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok)) {
    auto* const completion = static_cast<Completion*>(tag);
    NoteEnd(completion);
    completion->Happened(ok);
    handled_.fetch_add(1, std::memory_order_relaxed);
  }
}

Pollers::Pollers(std::vector<std::unique_ptr<grpc::CompletionQueue>> queues) {
  for (auto& queue : queues) pollers_.push_back(std::make_unique<Poller>(std::move(queue)));
}

Pollers::Pollers(uint32_t threads) {
  for (uint32_t i = 0; i < threads; ++i) {
    pollers_.push_back(std::make_unique<Poller>(std::make_unique<grpc::CompletionQueue>()));
  }
}

grpc::CompletionQueue& Pollers::Next() { return pollers_[next_++ % pollers_.size()]->queue(); }

}  // namespace thalweg
