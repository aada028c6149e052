#include "server/sidecar/collective/collective_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/shard_place.h"
#include "core/base/status_macros.h"
#include "core/base/wire_format.h"

namespace thalweg {
namespace {

// A group's chunks at a shard that may be under way; more than that hides no round trip.
constexpr uint32_t kMostWindow = 16;
constexpr uint32_t kRotation = 64;  // collectives after which the choice of shards repeats

// Returns InvalidArgument unless there is such a collective in the group.
absl::Status CheckPossible(const ipc::Collect& message, const GroupPlaces& places) {
  const uint64_t most = kMaxArenaPayloadBytes / SizeOf(message.dtype) / places.size();
  if (message.root >= places.size() || message.elems > most ||
      Folds(message.kind) == (message.fold == Fold::kNone)) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no ", Name(message.kind), " with fold ", Name(message.fold),
                     ", root ", message.root, " and ", message.elems, " elements in a group of ",
                     places.size(), " workers"));
  }
  if (!Folds(message.kind)) return absl::OkStatus();
  return Validate({Place::All(), Place::All(), message.fold}, FormatOf(message.dtype));
}

}  // namespace

CollectiveRunner::CollectiveRunner(Terms terms, const Context& context,
                                   CollectiveListener& listener)
    : terms_(std::move(terms)), context_(context), listener_(listener) {}

CollectiveRunner::GroupState* CollectiveRunner::FindLocked(uint32_t group) {
  const auto found = groups_.find(group);
  return found == groups_.end() ? nullptr : &found->second;
}

std::shared_ptr<NodeCollective> CollectiveRunner::FindLocked(uint32_t number, uint64_t sequence) {
  GroupState* const group = FindLocked(number);
  if (group == nullptr) return nullptr;
  const auto found = group->collectives.find(sequence);
  return found == group->collectives.end() ? nullptr : found->second;
}

void CollectiveRunner::Stop() {
  Thread thread;
  {
    MutexLock lock(mutex_);
    has_thread_ = true;  // a group that comes now starts none
    thread = std::move(thread_);
  }
  Wake();
  thread.Join();
}

absl::Status CollectiveRunner::MakeGroup(uint32_t local_rank, const ipc::MakeGroup& message) {
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", message.group, " '", message.name, "': ", why));
  };
  if (message.group == 0 || message.rank >= message.nodes.size()) {
    return refused(absl::StrCat("rank ", message.rank, " of ", message.nodes.size()));
  }
  if (message.nodes[message.rank] != terms_.node) {
    return refused(absl::StrCat("rank ", message.rank, " is on node ", terms_.node, ", not ",
                                message.nodes[message.rank]));
  }
  MutexLock lock(mutex_);
  auto& group = groups_[message.group];
  if (group.places == nullptr) {
    group.name = message.name;
    group.places = std::make_shared<const GroupPlaces>(message.nodes, terms_.node);
  }
  if (group.places->nodes() != message.nodes) return refused("its workers name other members");
  if (!group.ranks.emplace(local_rank, message.rank).second) return refused("declared twice");
  if (group.ranks.size() < group.places->here().size()) return absl::OkStatus();
  if (group.places->members().size() == 1) {
    group.is_declared = true;
    Queue(group);
  } else {
    undeclared_.push_back(message.group);
  }
  if (!std::exchange(has_thread_, true)) {
    thread_ = Thread("job-collect", [this] { RunLoop(); });
  }
  changed_.NotifyAll();
  return absl::OkStatus();
}

std::shared_ptr<NodeCollective> CollectiveRunner::MakeLocked(GroupState& group, uint32_t rank,
                                                             const ipc::Collect& message) {
  const auto released = [post = listener_.Poster(),
                         taken = ipc::Taken{message.group, message.sequence}](uint32_t local_rank) {
    post(local_rank, taken);
  };
  return std::make_shared<NodeCollective>(rank, message, group.name, group.places, released, Now());
}

absl::Status CollectiveRunner::Collect(uint32_t local_rank, ipc::Collect message) {
  bool small = false;
  {
    MutexLock lock(mutex_);
    GroupState* const group = FindLocked(message.group);
    if (group == nullptr || !group->ranks.contains(local_rank)) {
      return absl::InvalidArgumentError(
          absl::StrCat("local rank ", local_rank, " is in no group ", message.group));
    }
    const uint32_t rank = group->ranks.at(local_rank);
    if (message.sequence != ++group->last[local_rank]) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of group '", group->name,
                                                     "' begins collective ", message.sequence,
                                                     ", expected ", group->last[local_rank]));
    }
    THALWEG_RETURN_IF_ERROR(CheckPossible(message, *group->places));
    THALWEG_ASSIGN_OR_RETURN(auto arena, context_.arenas.Find(local_rank, message.arena));
    auto& collective = group->collectives[message.sequence];
    if (collective == nullptr) collective = MakeLocked(*group, rank, message);
    const uint64_t arena_bytes = arena == nullptr ? 0 : arena->payload_bytes();
    std::string values = std::exchange(message.values, {});
    message.values.resize(values.size());  // for its size
    THALWEG_RETURN_IF_ERROR(collective->Add(rank, message, arena_bytes,
                                            {local_rank, std::move(values), std::move(arena)}));
    record_.NoteCame(group->name, message, rank, Now());
    if (!collective->IsGathered()) return CheckComingLocked(*group, *collective);
    Queue(*group);
    small = !ready_.empty() && ready_.front()->IsSmall();
  }
  if (small) {
    Drain(/*small_only=*/true);
  }
  MutexLock lock(mutex_);
  if (!ready_.empty()) changed_.NotifyAll();
  return absl::OkStatus();
}

void CollectiveRunner::Queue(GroupState& group) {
  if (!group.is_declared) return;
  while (true) {
    const auto next = group.collectives.find(group.started + 1);
    if (next == group.collectives.end() || !next->second->IsGathered()) return;
    ++group.started;
    ready_.push_back(next->second);
  }
}

std::shared_ptr<NodeCollective> CollectiveRunner::NextLocked(bool small_only) {
  if (ready_.empty() || (small_only && !ready_.front()->IsSmall())) return nullptr;
  auto next = std::move(ready_.front());
  ready_.pop_front();
  return next;
}

void CollectiveRunner::Drain(bool small_only) {
  while (true) {
    std::shared_ptr<NodeCollective> next;
    {
      MutexLock lock(mutex_);
      if (is_running_) return;
      next = NextLocked(small_only);
      if (next == nullptr) return;
      is_running_ = true;
    }
    const absl::Status status = Start(next);
    {
      MutexLock lock(mutex_);
      is_running_ = false;
      changed_.NotifyAll();
    }
    if (!status.ok()) return listener_.OnCollectiveFailed(status);
  }
}

void CollectiveRunner::RunLoop() {
  while (context_.outcome.Check().ok()) {
    std::optional<uint32_t> undeclared;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !context_.outcome.Check().ok() ||
               (!is_running_ && (!ready_.empty() || !undeclared_.empty()));
      });
      if (!undeclared_.empty()) {
        undeclared = undeclared_.front();
        undeclared_.pop_front();
      }
    }
    if (!undeclared) {
      Drain(/*small_only=*/false);
    } else if (const absl::Status status = Declare(*undeclared); !status.ok()) {
      return listener_.OnCollectiveFailed(status);
    }
  }
}

absl::Status CollectiveRunner::Declare(uint32_t number) {
  Group group{number};
  {
    MutexLock lock(mutex_);
    group.members = FindLocked(number)->places->members();
  }
  group.window_chunks = std::min(context_.shards.agreed().window_chunks, kMostWindow);
  THALWEG_RETURN_IF_ERROR(context_.shards.MakeGroup(group, Now() + terms_.patience));
  MutexLock lock(mutex_);
  GroupState& state = *FindLocked(number);
  state.is_declared = true;
  Queue(state);
  return absl::OkStatus();
}

std::vector<uint32_t> CollectiveRunner::ShardsOf(GroupState& group, const Route& route,
                                                 const ChunkPlan& cut, uint64_t sequence) {
  const auto hosted = std::find(terms_.hosts.begin(), terms_.hosts.end(), route.via.node);
  const bool is_hosted = hosted != terms_.hosts.end();
  if (route.via.kind == Via::Kind::kHostedBy && is_hosted) {
    const auto shard = static_cast<uint32_t>(hosted - terms_.hosts.begin());
    return std::vector<uint32_t>(cut.Count(), shard);
  }
  std::optional<uint32_t> without;
  if (route.via.kind == Via::Kind::kNotHostedBy && is_hosted && terms_.hosts.size() > 1) {
    without = route.via.node;
  }
  auto placement = group.placements.find(without);
  if (placement == group.placements.end()) {
    std::vector<uint32_t> weights = context_.shards.plan().shares;
    if (without) {
      for (size_t k = 0; k < weights.size(); ++k) {
        weights[k] = terms_.hosts[k] == *without ? 0 : std::max(weights[k], 1u);
      }
    }
    placement = group.placements.emplace(without, Placement(std::move(weights))).first;
  }
  const BucketId id{static_cast<uint32_t>(sequence % kRotation), 0};
  return placement->second.Place(id, cut, WireFormat::kFloat32).shards;
}

absl::Status CollectiveRunner::Start(const std::shared_ptr<NodeCollective>& collective) {
  const uint32_t number = collective->spec().group;
  const uint64_t sequence = collective->spec().sequence;
  THALWEG_ASSIGN_OR_RETURN(auto arena, context_.arenas.Take(collective->result_size()));
  const ::thalweg::Terms agreed = context_.shards.agreed();
  uint64_t settled = 0;
  {
    MutexLock lock(mutex_);
    GroupState& group = *FindLocked(number);
    settled = group.settled;
    record_.NoteSent(collective->spec(), Now());
    collective->Begin(
        agreed.chunk_bytes, context_.shards.size(),
        [&](const Route& route, const ChunkPlan& cut)
            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ShardsOf(group, route, cut, sequence); },
        std::move(arena));
  }
  if (const auto& result = collective->result(); result != nullptr) {
    for (const auto& [local_rank, rank] : RanksOf(number)) {
      if (!context_.arenas.IsNewTo(local_rank, *result)) continue;
      listener_.OnMessage(local_rank,
                          ipc::ShareArena{result->number, result->arena.payload_bytes()},
                          result->arena.fd());
    }
  }
  const uint32_t chunks = collective->num_chunks();
  if (chunks == 0) Complete(collective);
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    if (collective->Crosses(chunk)) {
      THALWEG_ASSIGN_OR_RETURN(Contribution contribution,
                               collective->MakeContribution(chunk, context_.outcome));
      contribution.settled = settled;
      THALWEG_RETURN_IF_ERROR(
          context_.shards.Contribute(collective->ShardOf(chunk), std::move(contribution)));
    } else {
      THALWEG_RETURN_IF_ERROR(collective->Keep(chunk, context_.outcome));
      FinishChunk(collective);
    }
  }
  return absl::OkStatus();
}

void CollectiveRunner::OnResult(uint32_t shard, const RoundResult& received) {
  const uint32_t number = GroupOf(received.id);
  context_.progress.Note(Now());
  std::shared_ptr<NodeCollective> collective;
  {
    MutexLock lock(mutex_);
    collective = FindLocked(number, received.id.round);
  }
  absl::Status status = collective == nullptr
                            ? absl::InvalidArgumentError(
                                  absl::StrCat("aggregator shard ", shard, " answered ",
                                               ToString(received.id), ", which nobody waits for"))
                            : collective->TakeResult(received);
  if (status.ok()) status = context_.shards.OnAnswered(shard, number, 0);
  if (!status.ok()) return listener_.OnCollectiveFailed(status);
  FinishChunk(collective);
}

void CollectiveRunner::FinishChunk(const std::shared_ptr<NodeCollective>& collective) {
  // Before the chunk counts as done: then no part comes after the whole.
  if (const std::vector<uint32_t> parts = collective->TakeNewParts(); !parts.empty()) {
    for (const auto& [local_rank, rank] : RanksOf(collective->spec().group)) {
      for (const uint32_t part : parts) {
        const auto message = collective->PartFor(rank, part);
        if (message) listener_.OnMessage(local_rank, *message, -1);
      }
    }
  }
  if (collective->FinishChunk()) Complete(collective);
}

std::map<uint32_t, uint32_t> CollectiveRunner::RanksOf(uint32_t group) const {
  MutexLock lock(mutex_);
  return groups_.at(group).ranks;
}

void CollectiveRunner::Complete(const std::shared_ptr<NodeCollective>& collective) {
  const ipc::Collect& spec = collective->spec();
  std::map<uint32_t, uint32_t> ranks;
  const auto& result = collective->result();
  collective->DropValues();
  {
    MutexLock lock(mutex_);
    GroupState& group = *FindLocked(spec.group);
    ranks = group.ranks;
    record_.NoteDone(spec, Now());
    context_.completed.Add();
    group.done.insert(spec.sequence);
    while (group.done.erase(group.settled + 1) > 0) ++group.settled;
    if (result == nullptr) group.collectives.erase(spec.sequence);
  }
  for (const auto& [local_rank, rank] : ranks) {
    listener_.OnMessage(local_rank, collective->ResultFor(rank), -1);
  }
}

absl::Status CollectiveRunner::Take(uint32_t local_rank, const ipc::Taken& message) {
  MutexLock lock(mutex_);
  const auto collective = FindLocked(message.group, message.sequence);
  if (collective == nullptr || collective->result() == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("local rank ", local_rank, " has taken collective ", message.sequence,
                     " of group ", message.group, ", which has no result in an arena"));
  }
  if (!collective->NoteTaken()) return absl::OkStatus();
  context_.arenas.Return(collective->result(), Now());
  FindLocked(message.group)->collectives.erase(message.sequence);
  return absl::OkStatus();
}

absl::Status CollectiveRunner::OnWorkerLeft(uint32_t local_rank, const std::string& name) {
  MutexLock lock(mutex_);
  left_[local_rank] = name;
  for (const auto& [number, group] : groups_) {
    for (const auto& [sequence, collective] : group.collectives) {
      if (!collective->IsGathered()) THALWEG_RETURN_IF_ERROR(CheckComingLocked(group, *collective));
    }
  }
  return absl::OkStatus();
}

absl::Status CollectiveRunner::CheckComingLocked(const GroupState& group,
                                                 const NodeCollective& collective) const {
  if (left_.empty()) return absl::OkStatus();
  const std::vector<uint32_t> missing = collective.Missing();
  for (const auto& [local_rank, rank] : group.ranks) {
    const auto gone = left_.find(local_rank);
    if (gone == left_.end() || std::find(missing.begin(), missing.end(), rank) == missing.end()) {
      continue;
    }
    return absl::AbortedError(
        absl::StrCat(gone->second, " has left, but ", collective.Name(), " waits for it"));
  }
  return absl::OkStatus();
}

bool CollectiveRunner::IsBusy() const {
  MutexLock lock(mutex_);
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& entry) { return !entry.second.collectives.empty(); });
}

void CollectiveRunner::Wake() {
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

}  // namespace thalweg
