#include "server/sidecar/workers/roster.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status_macros.h"

namespace thalweg {

Roster::Roster(const ipc::Hello& first, SidecarMetrics& metrics, const JobOutcome& outcome,
               std::function<void(const absl::Status&)> on_stuck)
    : first_(first),
      metrics_(metrics),
      outcome_(outcome),
      on_stuck_(std::move(on_stuck)),
      workers_(first.local_size) {}

absl::Status Roster::CheckSameJob(const ipc::Hello& h) const {
  const auto differs = [&](const char* what, const auto& theirs, const auto& ours) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", h.rank, " says ", what, " is ", theirs,
                                                   ", rank ", first_.rank, " says ", ours));
  };
  if (h.world_size != first_.world_size) {
    return differs("the world size", h.world_size, first_.world_size);
  }
  if (h.num_nodes != first_.num_nodes) {
    return differs("the number of nodes", h.num_nodes, first_.num_nodes);
  }
  if (h.node != first_.node) return differs("the number of this node", h.node, first_.node);
  if (h.local_size != first_.local_size) {
    return differs("the number of workers on this node", h.local_size, first_.local_size);
  }
  if (h.codec != first_.codec) {
    return differs("the codec", h.codec.ToString(), first_.codec.ToString());
  }
  if (h.chunk_bytes != first_.chunk_bytes) {
    return differs("the chunk size in bytes", h.chunk_bytes, first_.chunk_bytes);
  }
  if (h.timeout_ms != first_.timeout_ms) {
    return differs("the timeout in ms", h.timeout_ms, first_.timeout_ms);
  }
  if (h.step_timeout_ms != first_.step_timeout_ms) {
    return differs("the timeout of a step in ms", h.step_timeout_ms, first_.step_timeout_ms);
  }
  if (h.min_nodes != first_.min_nodes) {
    return differs("the number of nodes to go on with", h.min_nodes, first_.min_nodes);
  }
  const auto places = [](const ipc::Hello& hello) {
    return absl::StrJoin(hello.shards, ", ", [](std::string* out, const ShardPlace& place) {
      absl::StrAppend(out, place.address);
      if (place.host != kNoHost) absl::StrAppend(out, " (node ", place.host, ")");
    });
  };
  if (h.shards != first_.shards) {
    return differs("the list of shards", absl::StrCat("'", places(h), "'"),
                   absl::StrCat("'", places(first_), "'"));
  }
  return CheckSameSecrets(h);
}

absl::Status Roster::CheckSameSecrets(const ipc::Hello& h) const {
  if (h.secret != first_.secret) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", h.rank,
                                                   " has another secret of the "
                                                   "job than rank ",
                                                   first_.rank));
  }
  if (h.known == first_.known) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", h.rank, h.known ? " goes on with a job" : " begins a job", ", rank ",
                   first_.rank, first_.known ? " goes on with another" : " begins one"));
}

absl::Status Roster::Admit(const ipc::Hello& hello, std::shared_ptr<Connection> connection,
                           const absl::Status& shares_gpu) {
  const auto on_stuck = [this, hello](const absl::Status& why) {
    on_stuck_(absl::Status(why.code(), absl::StrCat("rank ", hello.rank, " on ", hello.node_name,
                                                    " ", why.message())));
  };
  MutexLock lock(mutex_);
  // With the lock: whoever tells the workers of the failure later finds this one.
  THALWEG_RETURN_IF_ERROR(outcome_.Check());
  THALWEG_RETURN_IF_ERROR(CheckSeatLocked(hello));
  auto outbox = std::make_shared<Outbox>(std::move(connection), Outbox::Limits(), on_stuck);
  workers_[hello.local_rank] = {std::move(outbox),  hello.rank, hello.path, shares_gpu,
                                /*has_left=*/false, Now()};
  ++num_here_;
  metrics_.Workers(hello.path).Add(1);
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status Roster::CheckSeatLocked(const ipc::Hello& hello) const {
  for (const Worker& worker : workers_) {
    const bool same_seat = &worker == &workers_[hello.local_rank];
    if (worker.outbox == nullptr || !(same_seat || worker.rank == hello.rank)) continue;
    const auto peer = worker.outbox->connection().Peer();
    return absl::AlreadyExistsError(
        absl::StrCat("job '", first_.job, "' has a rank ", hello.rank, " already",
                     peer.ok() ? absl::StrCat(" (process ", peer->pid, ")") : "",
                     "; two workers must not have the same rank"));
  }
  return absl::OkStatus();
}

absl::Status Roster::Gather() {
  MutexLock lock(mutex_);
  // The watchdog fails the job when its workers take too long.
  changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return num_here_ == first_.local_size || !outcome_.Check().ok();
  });
  THALWEG_RETURN_IF_ERROR(outcome_.Check());
  has_gathered_ = true;
  return absl::OkStatus();
}

bool Roster::has_gathered() const {
  MutexLock lock(mutex_);
  return has_gathered_;
}

absl::Status Roster::CheckGathered(Duration waited, Duration timeout) const {
  MutexLock lock(mutex_);
  if (has_gathered_ || num_here_ == first_.local_size || waited <= timeout) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat("only ", num_here_, " of the ", first_.local_size,
                                                  " workers of ", first_.node_name, " connected"));
}

void Roster::Heard(uint32_t local_rank, TimePoint now) {
  MutexLock lock(mutex_);
  workers_[local_rank].last_heard = now;
}

std::vector<uint32_t> Roster::SilentOnes(const std::vector<uint32_t>& local_ranks,
                                         TimePoint since) const {
  MutexLock lock(mutex_);
  std::vector<uint32_t> silent;
  for (const uint32_t local_rank : local_ranks) {
    if (workers_[local_rank].last_heard < since) silent.push_back(local_rank);
  }
  return silent;
}

std::string Roster::SilentNames(TimePoint since) const {
  MutexLock lock(mutex_);
  std::vector<std::string> silent;
  for (const Worker& worker : workers_) {
    if (worker.outbox == nullptr || worker.has_left || worker.last_heard >= since) continue;
    silent.push_back(absl::StrCat("rank ", worker.rank));
  }
  return absl::StrJoin(silent, ", ");
}

void Roster::Wake() {
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

bool Roster::ChoosePaths() {
  MutexLock lock(mutex_);
  const bool use_gpus = std::all_of(workers_.begin(), workers_.end(),
                                    [](const Worker& worker) { return worker.shares_gpu.ok(); });
  for (Worker& worker : workers_) {
    if (use_gpus) {
      metrics_.Workers(worker.path).Add(-1);
      worker.path = GradientPath::kIpc;
      metrics_.Workers(worker.path).Add(1);
    }
    std::string why;
    if (worker.path != GradientPath::kCpu && !use_gpus) {
      why = absl::StrCat("; not ipc, since ", worker.shares_gpu.ok()
                                                  ? "another worker's GPU cannot be shared"
                                                  : worker.shares_gpu.message());
    }
    spdlog::info("job '{}': rank {}: path {}{}", first_.job, worker.rank, Name(worker.path), why);
  }
  return use_gpus;
}

GradientPath Roster::first_path() const {
  MutexLock lock(mutex_);
  return workers_[0].path;
}

Roster::Departure Roster::Leave(uint32_t local_rank, const absl::Status& reason) {
  MutexLock lock(mutex_);
  Worker& worker = workers_[local_rank];
  worker.has_left = true;
  ++num_left_;
  metrics_.Workers(worker.path).Add(-1);
  Departure departure{num_left_ == first_.local_size, absl::OkStatus()};
  if (!reason.ok()) {
    departure.failure =
        absl::Status(reason.code(), absl::StrCat("rank ", worker.rank, " on ", first_.node_name,
                                                 " is gone: ", reason.message()));
  } else if (!has_gathered_) {
    departure.failure =
        absl::AbortedError(absl::StrCat("rank ", worker.rank, " left before the job began"));
  }
  return departure;
}

bool Roster::IsOver() const {
  MutexLock lock(mutex_);
  return num_left_ == num_here_ && (num_here_ == first_.local_size || !outcome_.failure().ok());
}

std::string Roster::NameOf(uint32_t local_rank) const {
  MutexLock lock(mutex_);
  return absl::StrCat("rank ", workers_[local_rank].rank);
}

std::string Roster::NamesOf(const std::vector<uint32_t>& local_ranks) const {
  std::vector<std::string> names;
  for (const uint32_t local_rank : local_ranks) names.push_back(NameOf(local_rank));
  return absl::StrJoin(names, ", ");
}

std::shared_ptr<Outbox> Roster::OutboxOf(uint32_t local_rank) const {
  MutexLock lock(mutex_);
  return workers_[local_rank].outbox;
}

std::vector<std::shared_ptr<Outbox>> Roster::Outboxes(bool with_left) const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Outbox>> outboxes;
  for (const Worker& worker : workers_) {
    if (worker.outbox != nullptr && (with_left || !worker.has_left))
      outboxes.push_back(worker.outbox);
  }
  return outboxes;
}

void Roster::Tell(uint32_t local_rank, const ipc::Message& message, int fd) {
  OutboxOf(local_rank)->Post(message, fd);
}

void Roster::TellAll(const ipc::Message& message) {
  for (const auto& outbox : Outboxes(/*with_left=*/false)) outbox->Post(message);
}

void Roster::Welcome(ipc::Welcome message) {
  std::vector<std::pair<std::shared_ptr<Outbox>, GradientPath>> workers;
  {
    MutexLock lock(mutex_);
    for (const Worker& worker : workers_) {
      if (!worker.has_left) workers.emplace_back(worker.outbox, worker.path);
    }
  }
  for (const auto& [outbox, path] : workers) {
    message.path = path;
    outbox->Post(message);
  }
  MutexLock lock(mutex_);
  has_welcomed_ = true;
}

bool Roster::TellLost(const ipc::Lost& lost) {
  {
    MutexLock lock(mutex_);
    if (!has_welcomed_ || !lost_.insert(lost.node).second) return false;
  }
  TellAll(lost);
  return true;
}

void Roster::Flush(uint32_t local_rank, TimePoint deadline) {
  OutboxOf(local_rank)->Flush(deadline);
}

void Roster::Close(TimePoint deadline) {
  for (const auto& outbox : Outboxes(/*with_left=*/false)) outbox->Flush(deadline);
  for (const auto& outbox : Outboxes(/*with_left=*/true)) outbox->Close();
}

}  // namespace thalweg
