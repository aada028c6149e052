#include "client/core/collectives.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/completions.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

uint64_t SizeOf(const auto& pieces) {
  uint64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes;
}

uint64_t ToMillis(Duration timeout) { return static_cast<uint64_t>(ToNanos(timeout) / 1'000'000); }

// Numbers of groups for callbacks are those of their groups with the lane above these bits.
constexpr int kLaneShift = 24;
constexpr int kMaxLanes = 1 << (32 - kLaneShift);

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
        std::this_thread::yield();  // to the sidecar, which can send what is there
      }
    }
  }
  const auto total = static_cast<uint64_t>(to - begin);
  arena.PublishReady(
      static_cast<uint32_t>((total + ipc::kReadyBlockBytes - 1) / ipc::kReadyBlockBytes));
}

// Copies bytes [begin, end) of a result, which lies at `from`, to where its pieces belong.
void CopyOut(const std::byte* from, uint64_t begin, uint64_t end,
             const std::vector<std::span<std::byte>>& pieces) {
  uint64_t at = 0;  // of the piece, in the result
  for (const std::span<std::byte> piece : pieces) {
    const uint64_t first = std::max(begin, at);
    const uint64_t last = std::min<uint64_t>(end, at + piece.size());
    if (first < last) std::memcpy(piece.data() + (first - at), from + first, last - first);
    at += piece.size();
  }
}

}  // namespace

absl::Status Collectives::MakeGroup(const WorkerGroup& group) {
  {
    MutexLock lock(mutex_);
    groups_[group.number] = group;
  }
  return tell_(ipc::MakeGroup{group.number, group.rank, group.nodes, group.name}, -1);
}

bool Collectives::has_groups() const {
  MutexLock lock(mutex_);
  return !groups_.empty();
}

absl::StatusOr<uint32_t> Collectives::GroupOf(uint32_t group, int lane) {
  if (lane == 0) return group;
  WorkerGroup nested;
  {
    MutexLock lock(mutex_);
    const auto known = groups_.find(group);
    if (known == groups_.end() || group >> kLaneShift != 0 || lane >= kMaxLanes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("group ", group, " has no collectives in callbacks at depth ", lane,
                       ", expected a group below ", 1 << kLaneShift, " and a depth below ",
                       Completions::kHidden));
    }
    nested = known->second;
    nested.number += static_cast<uint32_t>(lane) << kLaneShift;
    if (groups_.contains(nested.number)) return nested.number;
  }
  const int depth = lane % Completions::kHidden;
  const std::string stage =
      lane == depth ? "in callbacks" : absl::StrCat("hidden stage ", lane / Completions::kHidden);
  absl::StrAppend(&nested.name, " (", stage, ", depth ", depth, ")");
  THALWEG_RETURN_IF_ERROR(MakeGroup(nested));
  return nested.number;
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
    if (spare_.empty()) spare_.push_back(++num_arenas_);
    number = spare_.back();
    spare_.pop_back();
  }
  THALWEG_ASSIGN_OR_RETURN(BucketArena memory, BucketArena::Create("thalweg-given", size, true));
  THALWEG_RETURN_IF_ERROR(tell_(ipc::ShareArena{number, size}, memory.fd()));
  memory.CloseFd();  // there may be thousands of them
  return std::make_shared<Arena>(Arena{number, std::move(memory)});
}

absl::Status Collectives::Start(CollectiveCall call, int lane, Done done) {
  const uint64_t bytes = SizeOf(call.given);
  ipc::Collect message{.kind = call.kind,
                       .fold = call.fold,
                       .dtype = call.dtype,
                       .root = call.root,
                       .elems = call.elems,
                       .timeout_ms = ToMillis(call.timeout),
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
  Key key;
  {
    MutexLock starting(starting_);
    THALWEG_ASSIGN_OR_RETURN(message.group, GroupOf(call.group, lane));
    key = {message.group, ++sequences_[message.group]};
    message.sequence = key.second;
    Pending pending{.what = Name(call.kind),
                    .group = message.group,
                    .lane = lane,
                    .got = std::move(call.got),
                    .from = nullptr,
                    .done = std::move(done),
                    .since = Now(),
                    .is_given = arena == nullptr,
                    .copied = {}};
    THALWEG_RETURN_IF_ERROR(Announce(key, std::move(pending), arena, std::move(message)));
  }
  if (arena == nullptr) return absl::OkStatus();
  CopyIn(call.given, arena->memory);
  MutexLock lock(mutex_);
  if (const auto found = pending_.find(key); found != pending_.end()) found->second.is_given = true;
  return absl::OkStatus();
}

absl::Status Collectives::Start(PeerCall call, int lane, Done done) {
  const bool is_send = call.way == PeerCall::Way::kSend;
  ipc::Send send{.group = call.group,
                 .to = call.peer.value_or(0),
                 .tag = call.tag,
                 .bytes = call.given.size(),
                 .timeout_ms = ToMillis(call.timeout),
                 .values = {}};
  std::shared_ptr<Arena> arena;
  if (send.bytes > ipc::kMaxInlineBytes) {
    THALWEG_ASSIGN_OR_RETURN(arena, TakeArena(send.bytes));
    send.arena = arena->number;
    CopyIn({call.given}, arena->memory);
  } else {
    send.values.assign(reinterpret_cast<const char*>(call.given.data()), call.given.size());
  }
  Pending pending{.what = is_send ? "send" : "receive",
                  .group = call.group,
                  .lane = lane,
                  .got = {},
                  .from = std::move(call.from),
                  .done = std::move(done),
                  .since = Now(),
                  .is_given = true,
                  .copied = {}};
  if (!is_send) pending.got.push_back(call.got);
  MutexLock starting(starting_);
  const Key key{0, ++sequences_[0]};
  if (is_send) {
    send.call = key.second;
    return Announce(key, std::move(pending), std::move(arena), std::move(send));
  }
  return Announce(key, std::move(pending), nullptr,
                  ipc::Receive{call.group, key.second, call.peer.value_or(ipc::kFromAnyone),
                               call.tag, call.got.size(), send.timeout_ms});
}

absl::Status Collectives::Announce(const Key& key, Pending pending, std::shared_ptr<Arena> arena,
                                   const ipc::Message& message) {
  {
    MutexLock lock(mutex_);
    pending_[key] = std::move(pending);
    if (arena != nullptr) lent_[key] = std::move(arena);
  }
  const absl::Status sent = tell_(message, -1);
  if (sent.ok()) return sent;
  MutexLock lock(mutex_);
  // Otherwise the session has failed in the meantime, and has told.
  return pending_.erase(key) == 1 ? sent : absl::OkStatus();
}

absl::Status Collectives::OnShareArena(const ipc::ShareArena& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Open(std::move(fd), message.bytes));
  arena.CloseFd();
  MutexLock lock(mutex_);
  results_[message.number] = std::make_shared<const BucketArena>(std::move(arena));
  return absl::OkStatus();
}

absl::Status Collectives::OnCollectedPart(const ipc::CollectedPart& message) {
  MutexLock lock(mutex_);
  const auto found = pending_.find({message.group, message.sequence});
  const auto arena = results_.find(message.arena);
  const uint64_t size = found == pending_.end() ? 0 : SizeOf(found->second.got);
  const uint64_t room = arena == results_.end() ? 0 : arena->second->payload_bytes();
  const bool is_known = found != pending_.end() && arena != results_.end();
  if (!is_known || message.begin > size || message.bytes > size - message.begin ||
      message.offset > room || size > room - message.offset) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the sidecar names bytes ", message.begin, " to ", message.begin + message.bytes,
        " of collective ", message.sequence, " of group ", message.group, ", which has ", size));
  }
  Pending& pending = found->second;
  // What the worker gives may lie where its result goes, and so may the group's earlier results.
  if (!pending.is_given || copied_[message.group] + 1 != message.sequence) return absl::OkStatus();
  const uint64_t end = message.begin + message.bytes;
  // With the lock: after TakeAll() the memory may be gone.
  CopyOut(arena->second->payload() + message.offset, message.begin, end, pending.got);
  pending.copied[message.begin] = end;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Collectives::Finished>> Collectives::OnCollected(
    ipc::Collected message) {
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
        "the sidecar completed ", pending->second.what, " ", message.sequence, " of group ",
        pending->second.group, " with ", message.bytes, " bytes, expected ", expected));
  }
  const Key key = pending->first;
  finished_[key] = {pending->second.lane,
                    std::move(message),
                    arena == results_.end() ? nullptr : arena->second,
                    std::move(pending->second.got),
                    std::move(pending->second.from),
                    std::move(pending->second.copied),
                    std::move(pending->second.done)};
  pending_.erase(pending);
  const auto oldest = pending_.lower_bound({key.first, 0});
  const bool is_message = key.first == 0;
  std::vector<Finished> ready;
  auto next = is_message ? finished_.find(key) : finished_.lower_bound({key.first, 0});
  while (next != finished_.end() && next->first.first == key.first &&
         (is_message || oldest == pending_.end() || next->first < oldest->first)) {
    ready.push_back(std::move(next->second));
    next = finished_.erase(next);
  }
  return ready;
}

absl::Status Collectives::OnTaken(const ipc::Taken& message) {
  MutexLock lock(mutex_);
  const auto lent = lent_.find({message.group, message.sequence});
  if (lent == lent_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("the sidecar has taken values of collective ",
                                                   message.sequence, " of group ", message.group,
                                                   ", which has given none"));
  }
  lent->second->last_used = Now();
  free_.push_back(std::move(lent->second));
  lent_.erase(lent);
  return absl::OkStatus();
}

void Collectives::Finish(const Finished& finished) {
  const ipc::Collected& message = finished.message;
  const std::byte* from = finished.arena == nullptr || message.arena == 0
                              ? reinterpret_cast<const std::byte*>(message.values.data())
                              : finished.arena->payload() + message.offset;
  uint64_t at = 0;
  for (const auto& [begin, end] : finished.copied) {
    CopyOut(from, at, begin, finished.got);
    at = std::max(at, end);
  }
  CopyOut(from, at, message.bytes, finished.got);
  {
    MutexLock lock(mutex_);
    copied_[message.group] = message.sequence;
  }
  absl::Status taken;
  if (message.arena != 0) taken = tell_(ipc::Taken{message.group, message.sequence}, -1);
  // A sidecar that is gone is noticed by who reads from it.
  taken.IgnoreError();
  if (finished.from != nullptr) finished.from(message.from);
  finished.done(absl::OkStatus());
}

std::vector<std::pair<int, Collectives::Done>> Collectives::TakeAll() {
  std::vector<std::pair<int, Done>> all;
  MutexLock lock(mutex_);
  for (auto& [key, pending] : pending_) all.emplace_back(pending.lane, std::move(pending.done));
  for (auto& [key, finished] : finished_) all.emplace_back(finished.lane, std::move(finished.done));
  pending_.clear();
  finished_.clear();
  return all;
}

absl::Status Collectives::GiveUpIdle(TimePoint now) {
  std::vector<std::shared_ptr<Arena>> idle;
  {
    MutexLock lock(mutex_);
    const auto rest = std::partition(free_.begin(), free_.end(), [now](const auto& arena) {
      return now - arena->last_used < kArenaIdleTime;
    });
    idle.assign(std::make_move_iterator(rest), std::make_move_iterator(free_.end()));
    free_.erase(rest, free_.end());
  }
  if (idle.empty()) return absl::OkStatus();
  THALWEG_ASSIGN_OR_RETURN(const BucketArena nothing,
                           BucketArena::Create("thalweg-nothing", 1, true));
  for (const auto& arena : idle) {
    THALWEG_RETURN_IF_ERROR(
        tell_(ipc::ShareArena{arena->number, nothing.payload_bytes()}, nothing.fd()));
    MutexLock lock(mutex_);
    spare_.push_back(arena->number);
  }
  return absl::OkStatus();
}

void Collectives::Release() {
  MutexLock lock(mutex_);
  lent_.clear();
  free_.clear();
  results_.clear();
}

std::optional<TimePoint> Collectives::Since() const {
  MutexLock lock(mutex_);
  std::optional<TimePoint> since;
  for (const auto& [key, pending] : pending_)
    since = std::min(since.value_or(pending.since), pending.since);
  return since;
}

}  // namespace thalweg
