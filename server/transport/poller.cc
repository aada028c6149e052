#include "server/transport/poller.h"

#include <utility>

namespace thalweg {
namespace {

thread_local Poller* this_threads_poller = nullptr;

}  // namespace

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
    static_cast<Completion*>(tag)->Happened(ok);
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
