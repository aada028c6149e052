// This file holds the part of PostOffice that moves the bytes of long messages.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/sidecar/letters/post_office.h"

namespace thalweg {
namespace {

constexpr uint64_t kAskBytes = 1 << 20;  // for one message at a time

}  // namespace

absl::Status PostOffice::SendBodyLocked(uint32_t node, const Letter& request, Copies& copies) {
  const auto found = sending_.find({node, request.message});
  if (found == sending_.end() || request.offset > found->second->call.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("it asks for ", request.offset, " bytes of message ", request.message));
  }
  const std::shared_ptr<Sending> sending = found->second;
  const uint64_t total = sending->call.bytes;
  calls_.NoteProgress({sending->local_rank, sending->call.call}, Now());
  // A short one has gone with its offer.
  if (sending->is_done && request.offset == total) unasked_[node] -= total;
  while (sending->gone < request.offset) {
    const uint64_t bytes = std::min(BodyBytes(), request.offset - sending->gone);
    const std::byte* const from = (*sending->values)[0]->data() + sending->gone;
    WithLocked(node).Write(
        {.kind = LetterKind::kBody, .message = request.message, .offset = sending->gone},
        Payload({from, bytes}, sending->values));
    sending->gone += bytes;
  }
  if (request.offset < total) return absl::OkStatus();
  SentLocked(*sending);
  sending_.erase(found);
  copies.emplace_back([sending] {});  // its end tells the worker: without the lock
  return absl::OkStatus();
}

void PostOffice::AskLocked() {
  while (!hungry_.empty() && on_the_way_ < kMostOnTheWay) {
    const std::shared_ptr<Receiving> receive = std::move(hungry_.front());
    hungry_.pop_front();
    const Offer& offer = receive->offer;
    const uint64_t more = std::min(kAskBytes, offer.bytes - receive->wanted);
    receive->wanted += more;
    on_the_way_ += more;
    WithLocked(offer.node)
        .Write({.kind = LetterKind::kRequest, .message = offer.message, .offset = receive->wanted},
               {});
    if (receive->wanted < offer.bytes) hungry_.push_back(receive);
  }
}

void PostOffice::NoteReceived(const std::shared_ptr<Receiving>& receive, uint64_t bytes) {
  MutexLock lock(mutex_);
  receive->received += bytes;
  const ipc::Receive& call = receive->call;
  calls_.NoteProgress({receive->local_rank, call.call}, Now());
  if (receive->received < call.bytes) return;
  receiving_.erase({receive->offer.node, receive->offer.message});
  calls_.End({receive->local_rank, call.call});
  context_.received.Add();
  if (receive->arena != nullptr) results_[{receive->local_rank, call.call}] = receive->arena;
  actions_.emplace_back([this, receive] {
    const uint32_t worker = receive->local_rank;
    ipc::Collected message{.sequence = receive->call.call, .values = std::move(receive->values)};
    message.bytes = receive->call.bytes;
    message.from = receive->offer.from;
    if (const auto& result = receive->arena; result != nullptr) {
      message.arena = result->number;
      if (context_.arenas.IsNewTo(worker, *result)) {
        const ipc::ShareArena share{result->number, result->arena.payload_bytes()};
        listener_.OnMessage(worker, share, result->arena.fd());
      }
    }
    listener_.OnMessage(worker, message, -1);
    return absl::OkStatus();
  });
}

}  // namespace thalweg
