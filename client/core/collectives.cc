#include "client/core/collectives.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

uint64_t SizeOf(const auto& pieces) {
  uint64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes;
}

// The sidecar reports what is late; it may take this long.
constexpr Duration kGrace = std::chrono::seconds(5);

// Copies the pieces into the arena, telling the sidecar of each block that is there.
void CopyIn(const std::vector<std::span<const std::byte>>& pieces, BucketArena& arena) {
  std::byte* const begin = arena.payload();
  std::byte* to = begin;
  for (std::span<const std::byte> piece : pieces) {
    while (!piece.empty()) {
      const auto done = static_cast<uint64_t>(to - begin);
      const uint64_t room = ipc::kReadyBlockBytes - done % ipc::kReadyBlockBytes;
      const uint64_t bytes = std::min<uint64_t>(room, piece.size());
      std::memcpy(to, piece.data(), bytes);
      piece = piece.subspan(bytes);
      to += bytes;
      if (bytes == room) {
        arena.PublishReady(static_cast<uint32_t>((done + bytes) / ipc::kReadyBlockBytes));
      }
    }
  }
  const auto total = static_cast<uint64_t>(to - begin);
  arena.PublishReady(
      static_cast<uint32_t>((total + ipc::kReadyBlockBytes - 1) / ipc::kReadyBlockBytes));
}

}  // namespace

absl::Status Collectives::MakeGroup(const WorkerGroup& group) {
  {
    MutexLock lock(mutex_);
    names_[group.number] = group.name;
  }
  return connection_.Send(ipc::MakeGroup{group.number, group.rank, group.nodes, group.name});
}

absl::StatusOr<std::shared_ptr<Collectives::Arena>> Collectives::TakeArena(uint64_t bytes) {
  const uint64_t size = std::bit_ceil(bytes);
  uint32_t number = 0;
  {
    MutexLock lock(mutex_);
    const auto fits = std::find_if(free_.begin(), free_.end(), [size](const auto& arena) {
      return arena->memory.payload_bytes() == size;
    });
    if (fits != free_.end()) {
      auto arena = std::move(*fits);
      free_.erase(fits);
      return arena;
    }
    number = ++num_arenas_;
  }
  THALWEG_ASSIGN_OR_RETURN(BucketArena memory, BucketArena::Create("thalweg-given", size, true));
  THALWEG_RETURN_IF_ERROR(connection_.Send(ipc::ShareArena{number, size}, memory.fd()));
  return std::make_shared<Arena>(Arena{number, std::move(memory)});
}

absl::Status Collectives::Start(CollectiveCall call, Done done) {
  const uint64_t bytes = SizeOf(call.given);
  ipc::Collect message{.group = call.group,
                       .kind = call.kind,
                       .fold = call.fold,
                       .dtype = call.dtype,
                       .root = call.root,
                       .elems = call.elems,
                       .timeout_ms = static_cast<uint64_t>(ToNanos(call.timeout) / 1'000'000),
                       .values = {}};
  std::shared_ptr<Arena> arena;
  if (bytes <= ipc::kMaxInlineBytes) {
    for (const auto& piece : call.given) {
      message.values.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
  } else {
    THALWEG_ASSIGN_OR_RETURN(arena, TakeArena(bytes));
    message.arena = arena->number;
    arena->memory.ResetReady();
  }
  {
    MutexLock starting(starting_);
    message.sequence = ++sequences_[call.group];
    const Key key{call.group, message.sequence};
    {
      MutexLock lock(mutex_);
      pending_[key] = {call.kind, std::move(call.got), std::move(done), Now(), call.timeout};
      if (arena != nullptr) lent_[key] = arena;
    }
    const absl::Status sent = connection_.Send(message);
    if (!sent.ok()) {
      MutexLock lock(mutex_);
      // Otherwise the session has failed in the meantime, and has told.
      return pending_.erase(key) == 1 ? sent : absl::OkStatus();
    }
  }
  if (arena != nullptr) CopyIn(call.given, arena->memory);
  return absl::OkStatus();
}

absl::Status Collectives::OnShareArena(const ipc::ShareArena& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Open(std::move(fd), message.bytes));
  MutexLock lock(mutex_);
  results_[message.number] = std::make_shared<const BucketArena>(std::move(arena));
  return absl::OkStatus();
}

absl::StatusOr<Collectives::Finished> Collectives::OnCollected(ipc::Collected message) {
  MutexLock lock(mutex_);
  const auto pending = pending_.find({message.group, message.sequence});
  if (pending == pending_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("the sidecar completed collective ",
                                                   message.sequence, " of group ", message.group,
                                                   ", which is not in flight"));
  }
  const uint64_t expected = SizeOf(pending->second.got);
  const auto arena = results_.find(message.arena);
  const bool fits = message.arena == 0
                        ? message.values.size() == expected
                        : arena != results_.end() &&
                              message.offset <= arena->second->payload_bytes() &&
                              arena->second->payload_bytes() - message.offset >= expected;
  if (message.bytes != expected || !fits) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the sidecar completed ", Name(pending->second.kind), " ", message.sequence, " of group ",
        message.group, " with ", message.bytes, " bytes, expected ", expected));
  }
  Finished finished{std::move(message), arena == results_.end() ? nullptr : arena->second,
                    std::move(pending->second.got), std::move(pending->second.done)};
  pending_.erase(pending);
  return finished;
}

absl::Status Collectives::OnTaken(const ipc::Taken& message) {
  MutexLock lock(mutex_);
  const auto lent = lent_.find({message.group, message.sequence});
  if (lent == lent_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("the sidecar has taken values of collective ",
                                                   message.sequence, " of group ", message.group,
                                                   ", which has given none"));
  }
  free_.push_back(std::move(lent->second));
  lent_.erase(lent);
  return absl::OkStatus();
}

void Collectives::Finish(const Finished& finished) {
  const ipc::Collected& message = finished.message;
  const std::byte* from = finished.arena == nullptr || message.arena == 0
                              ? reinterpret_cast<const std::byte*>(message.values.data())
                              : finished.arena->payload() + message.offset;
  for (const std::span<std::byte> piece : finished.got) {
    if (!piece.empty()) std::memcpy(piece.data(), from, piece.size());
    from += piece.size();
  }
  absl::Status taken;
  if (message.arena != 0) taken = connection_.Send(ipc::Taken{message.group, message.sequence});
  // A sidecar that is gone is noticed by who reads from it.
  taken.IgnoreError();
  finished.done(absl::OkStatus());
}

std::vector<Collectives::Done> Collectives::TakeAll() {
  std::vector<Done> all;
  MutexLock lock(mutex_);
  for (auto& [key, pending] : pending_) all.push_back(std::move(pending.done));
  pending_.clear();
  return all;
}

std::string Collectives::Late(TimePoint now) const {
  MutexLock lock(mutex_);
  for (const auto& [key, pending] : pending_) {
    if (now - pending.since <= pending.timeout + kGrace) continue;
    const auto name = names_.find(key.first);
    return absl::StrCat(Name(pending.kind), " ", key.second, " of group '",
                        name == names_.end() ? "" : name->second, "'");
  }
  return "";
}

std::optional<TimePoint> Collectives::Since() const {
  MutexLock lock(mutex_);
  std::optional<TimePoint> since;
  for (const auto& [key, pending] : pending_)
    since = std::min(since.value_or(pending.since), pending.since);
  return since;
}

}  // namespace thalweg
