#include "server/sidecar/letters/post_office.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// Letters of all others that may be on the way to one node. Fewer than kMaxWindowChunks, which a
// shard takes for a node that does not read.
constexpr uint32_t kMostLetters = 512;
// Bytes that a node has sent unasked to one other, and that no receiver there has taken yet; and
// those that workers of this node have sent to one of them.
constexpr uint64_t kMostUnasked = 4 << 20;
constexpr uint64_t kMostShortBytes = 64 << 10;
// What a message between workers of this node takes beside its bytes.
constexpr uint64_t kLocalBytes = 512;

uint32_t WindowFor(uint32_t num_nodes) {
  return std::clamp<uint32_t>(kMostLetters / std::max(1u, num_nodes - 1), 2, 32);
}

uint64_t ShortBytesFor(uint32_t num_nodes) {
  const uint64_t letters = uint64_t{WindowFor(num_nodes)} * std::max(1u, num_nodes - 1);
  return std::min(kMostShortBytes, PostOffice::kMostOnTheWay / letters);
}

void Copy(const Payload& payload, std::byte* to) {
  for (const auto& piece : payload.pieces) {
    if (!piece.empty()) std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

}  // namespace

PostOffice::PostOffice(Terms terms, const Context& context, CollectiveListener& listener)
    : terms_(std::move(terms)),
      context_(context),
      listener_(listener),
      window_(WindowFor(terms_.num_nodes)),
      short_bytes_(ShortBytesFor(terms_.num_nodes)) {}

void PostOffice::MakeGroup(uint32_t local_rank, const ipc::MakeGroup& message) {
  MutexLock lock(mutex_);
  GroupState& group = groups_[message.group];
  group.name = message.name;
  group.nodes = message.nodes;
  group.ranks[local_rank] = message.rank;
  group.local_ranks[message.rank] = local_rank;
}

absl::StatusOr<PostOffice::GroupState*> PostOffice::FindLocked(uint32_t local_rank, uint32_t number,
                                                               uint32_t peer) {
  const auto found = groups_.find(number);
  if (found == groups_.end() || !found->second.ranks.contains(local_rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("local rank ", local_rank, " is in no group ", number));
  }
  GroupState& group = found->second;
  if (peer != ipc::kFromAnyone && peer >= group.nodes.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group '", group.name, "' has ", group.nodes.size(), " ranks, there is no rank ", peer));
  }
  return &group;
}

absl::Status PostOffice::Send(uint32_t local_rank, ipc::Send message) {
  THALWEG_ASSIGN_OR_RETURN(auto arena, context_.arenas.Find(local_rank, message.arena));
  const uint64_t given = arena == nullptr ? message.values.size() : arena->payload_bytes();
  if (arena == nullptr ? given != message.bytes : given < message.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("local rank ", local_rank, " sends ",
                                                   message.bytes, " bytes and gives ", given));
  }
  auto sending = std::make_shared<Sending>();
  sending->local_rank = local_rank;
  sending->values =
      std::make_shared<NodeValues>(1, [post = listener_.Poster(), call = message.call](
                                          uint32_t worker) { post(worker, ipc::Taken{0, call}); });
  (*sending->values)[0].emplace(local_rank, std::exchange(message.values, {}), std::move(arena));
  sending->call = std::move(message);
  const ipc::Send& call = sending->call;
  Copies copies;
  {
    MutexLock lock(mutex_);
    THALWEG_ASSIGN_OR_RETURN(const GroupState* const group,
                             FindLocked(local_rank, call.group, call.to));
    sending->from = group->ranks.at(local_rank);
    sending->node = group->nodes[call.to];
    calls_.Add({local_rank, call.call},
               {absl::StrCat("send of ", call.bytes, " bytes with tag ", call.tag, " from rank ",
                             sending->from, " to rank ", call.to, " of group '", group->name, "'"),
                Now(), FromMillis(call.timeout_ms)});
    if (sending->node == terms_.node) {
      uint64_t& unreceived = unreceived_[{call.group, call.to}];
      if (call.arena == 0 && unreceived + kLocalBytes + call.bytes <= kMostUnasked) {
        unreceived += kLocalBytes + call.bytes;
        SentLocked(*sending);
      }
      Offer offer;
      offer.from = sending->from;
      offer.tag = call.tag;
      offer.bytes = call.bytes;
      offer.node = terms_.node;
      offer.local = sending;
      const auto receive = mailboxes_[{call.group, call.to}].Put(std::move(offer));
      if (receive != nullptr) THALWEG_RETURN_IF_ERROR(MatchedLocked(receive, copies));
    } else {
      OfferLocked(sending);
    }
  }
  for (const auto& copy : copies) copy();
  Act();
  return absl::OkStatus();
}

void PostOffice::OfferLocked(const std::shared_ptr<Sending>& sending) {
  const ipc::Send& call = sending->call;
  Letter letter{.kind = LetterKind::kOffer, .group = call.group, .from = sending->from};
  letter.to = call.to;
  letter.tag = call.tag;
  letter.bytes = call.bytes;
  letter.message = ++messages_[sending->node];
  uint64_t& unasked = unasked_[sending->node];
  Payload body;
  if (call.bytes <= std::min(short_bytes_, BodyBytes()) && unasked + call.bytes <= kMostUnasked) {
    unasked += call.bytes;
    body = {{(*sending->values)[0]->data(), call.bytes}, sending->values};
    sending->gone = call.bytes;
    SentLocked(*sending);
    // The letter keeps them as long as they are needed.
    if (call.bytes > 0) sending->values.reset();
  }
  sending_[{sending->node, letter.message}] = sending;
  WithLocked(sending->node).Write(letter, std::move(body));
}

void PostOffice::SentLocked(Sending& sending) {
  if (std::exchange(sending.is_done, true)) return;
  const uint32_t worker = sending.local_rank;
  calls_.End({worker, sending.call.call});
  ipc::Collected message{.sequence = sending.call.call, .values = {}};
  actions_.emplace_back([this, worker, message = std::move(message)] {
    listener_.OnMessage(worker, message, -1);
    return absl::OkStatus();
  });
}

absl::Status PostOffice::Receive(uint32_t local_rank, const ipc::Receive& message) {
  auto receive = std::make_shared<Receiving>();
  receive->local_rank = local_rank;
  receive->call = message;
  THALWEG_ASSIGN_OR_RETURN(receive->arena, context_.arenas.Take(message.bytes));
  if (receive->arena == nullptr) receive->values.resize(message.bytes);
  Copies copies;
  {
    MutexLock lock(mutex_);
    THALWEG_ASSIGN_OR_RETURN(const GroupState* const group,
                             FindLocked(local_rank, message.group, message.from));
    receive->to = group->ranks.at(local_rank);
    const std::string source =
        message.from == ipc::kFromAnyone ? "any rank" : absl::StrCat("rank ", message.from);
    OpenCalls::Call call{
        absl::StrCat("receive of ", message.bytes, " bytes with tag ", message.tag, " from ",
                     source, " on rank ", receive->to, " of group '", group->name, "'"),
        Now(), FromMillis(message.timeout_ms)};
    const auto sender = group->local_ranks.find(message.from);
    if (sender != group->local_ranks.end()) call.awaited = sender->second;
    const OpenCalls::Id id{local_rank, message.call};
    calls_.Add(id, std::move(call));
    const bool is_offered = mailboxes_[{message.group, receive->to}].Ask(receive);
    THALWEG_RETURN_IF_ERROR(is_offered ? MatchedLocked(receive, copies) : calls_.CheckAwaited(id));
  }
  for (const auto& copy : copies) copy();
  Act();
  return absl::OkStatus();
}

absl::Status PostOffice::MatchedLocked(const std::shared_ptr<Receiving>& receive, Copies& copies) {
  const Offer& offer = receive->offer;
  if (offer.bytes != receive->call.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", offer.from, " sends ", offer.bytes, " bytes to the ",
                     calls_.WhatOf({receive->local_rank, receive->call.call})));
  }
  if (offer.local != nullptr) {
    copies.emplace_back([this, receive, sending = offer.local] {
      if (receive->call.bytes > 0) {
        std::memcpy(receive->data(), (*sending->values)[0]->data(), receive->call.bytes);
      }
      {
        MutexLock lock(mutex_);
        if (sending->is_done) {
          unreceived_[{receive->call.group, receive->to}] -= kLocalBytes + receive->call.bytes;
        }
        SentLocked(*sending);
        receive->offer.local.reset();
      }
      NoteReceived(receive, receive->call.bytes);
    });
    return absl::OkStatus();
  }
  receiving_[{offer.node, offer.message}] = receive;
  if (offer.body.SizeBytes() != offer.bytes) {
    hungry_.push_back(receive);
    AskLocked();
    return absl::OkStatus();
  }
  receive->wanted = receive->come = offer.bytes;
  DismissLocked(offer);
  copies.emplace_back([this, receive, body = std::exchange(receive->offer.body, {})] {
    Copy(body, receive->data());
    NoteReceived(receive, receive->call.bytes);
  });
  return absl::OkStatus();
}

void PostOffice::OnLetter(const RoundResult& received) {
  const uint32_t node = SenderOf(received.id);
  context_.progress.Note(Now());
  Copies copies;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    auto letters = WithLocked(node).Take(received.id.round, received.payload);
    status = letters.status();
    for (size_t i = 0; status.ok() && i < letters->size(); ++i) {
      status = ReadLocked(node, std::move((*letters)[i]), copies);
    }
  }
  for (const auto& copy : copies) copy();
  if (!status.ok()) {
    return listener_.OnCollectiveFailed(absl::Status(
        status.code(), absl::StrCat("message from node ", node, ": ", status.message())));
  }
  Act();
}

absl::Status PostOffice::ReadLocked(uint32_t node, OpenedLetter opened, Copies& copies) {
  const Letter& letter = opened.letter;
  const uint64_t bytes = opened.body.SizeBytes();
  const auto refused = [&](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat("message ", letter.message, " of ", letter.bytes,
                                                   " bytes, ", bytes, " from byte ", letter.offset,
                                                   " on: ", why));
  };
  if (letter.kind == LetterKind::kRequest) return SendBodyLocked(node, letter, copies);
  if (letter.kind == LetterKind::kOffer) {
    if (bytes != 0 && bytes != letter.bytes) return refused("offers come with all bytes or none");
    Offer offer{letter.from, letter.tag, letter.bytes, node, letter.message, std::move(opened.body),
                nullptr};
    if (is_draining_) {
      DismissLocked(offer);
      return absl::OkStatus();
    }
    const auto receive = mailboxes_[{letter.group, letter.to}].Put(std::move(offer));
    return receive == nullptr ? absl::OkStatus() : MatchedLocked(receive, copies);
  }
  const auto found = receiving_.find({node, letter.message});
  if (found == receiving_.end()) return refused("nobody waits for it");
  const auto& receive = found->second;
  if (letter.offset != receive->come || bytes > receive->wanted - receive->come) {
    return refused("these have not been asked for");
  }
  std::byte* const to = receive->data() + receive->come;
  receive->come += bytes;
  on_the_way_ -= bytes;
  copies.emplace_back([this, receive, to, bytes, body = std::move(opened.body)] {
    Copy(body, to);
    NoteReceived(receive, bytes);
  });
  AskLocked();
  return absl::OkStatus();
}

Correspondence& PostOffice::WithLocked(uint32_t node) {
  actions_.emplace_back([this, node] { return PostNext(node); });
  return with_.try_emplace(node, window_).first->second;
}

void PostOffice::Act() {
  while (true) {
    std::function<absl::Status()> next;
    {
      MutexLock lock(mutex_);
      if (is_acting_ || actions_.empty()) return;
      is_acting_ = true;
      next = std::move(actions_.front());
      actions_.pop_front();
    }
    const absl::Status status = next();
    {
      MutexLock lock(mutex_);
      is_acting_ = false;
      if (is_draining_) changed_.NotifyAll();
    }
    if (!status.ok()) return listener_.OnCollectiveFailed(status);
  }
}

absl::Status PostOffice::PostNext(uint32_t node) {
  while (true) {
    std::optional<Correspondence::Outgoing> next;
    {
      MutexLock lock(mutex_);
      next = with_.at(node).Next();
    }
    if (!next) return absl::OkStatus();
    Contribution letter;
    letter.id = {LettersOf(terms_.node), static_cast<uint32_t>(next->number % kMostLetters),
                 next->number};
    letter.wire = WireFormat::kDenseUInt8;
    letter.elems = next->sealed.SizeBytes();
    letter.collective = {Place::One(terms_.node), Place::One(node), Fold::kNone};
    letter.payload = std::move(next->sealed);
    // By the shard on the receiver's node its bytes cross the network once.
    const auto hosted = std::find(terms_.hosts.begin(), terms_.hosts.end(), node);
    const auto shard = hosted == terms_.hosts.end()
                           ? static_cast<uint32_t>((node + next->number) % context_.shards.size())
                           : static_cast<uint32_t>(hosted - terms_.hosts.begin());
    THALWEG_RETURN_IF_ERROR(context_.shards.Post(shard, std::move(letter)));
  }
}

absl::Status PostOffice::Take(uint32_t local_rank, const ipc::Taken& message) {
  MutexLock lock(mutex_);
  const auto found = results_.find({local_rank, message.sequence});
  if (found == results_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("local rank ", local_rank, " has taken call ",
                                                   message.sequence,
                                                   ", which has no result in an arena"));
  }
  context_.arenas.Return(std::move(found->second), Now());
  results_.erase(found);
  return absl::OkStatus();
}

}  // namespace thalweg
