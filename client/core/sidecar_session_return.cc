// This file lets a session go on when its sidecar's process has ended: the next process gets what
// it needs from the workers, who have the gradients, the last results and what the shards said.
//
//   worker                                             the sidecar's next process
//     │ Hello with `known` ───────────────────────────▶
//     │ per bucket: KeptBucket + fd, KeptResult + fd,
//     │ CodecMemory + fd ─────────────────────────────▶ takes up the node's places at the shards
//     │ ◀── CodecMemory + fd, BucketReady + fd; Complete of a round that ended unheard; Welcome
//     │ buckets and rounds that the worker has begun since, and those that are in flight ──▶

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/fork_guard.h"
#include "client/core/sidecar_session.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// A sidecar that is not there yet is looked for again after this time.
constexpr Duration kLookForSidecar = std::chrono::milliseconds(20);

}  // namespace

absl::Status SidecarSession::Return(const absl::Status& lost) {
  THALWEG_RETURN_IF_ERROR(LeaveForNow(lost));
  const TimePoint deadline = Now() + options_.reconnect;
  absl::Status status;
  do {
    status = TryToReturn(deadline);
    if (!absl::IsUnavailable(status)) return status;
    MutexLock lock(mutex_);
    const bool has_failed =
        changed_.WaitUntil(mutex_, Now() + kLookForSidecar,
                           [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !status_.ok(); });
    if (has_failed) return status_;
  } while (Now() < deadline);
  return absl::UnavailableError(absl::StrCat(
      lost.message(), "; within ", ToSeconds(options_.reconnect),
      " s (THALWEG_RECONNECT) no other process has taken its place: ", status.message()));
}

absl::Status SidecarSession::LeaveForNow(const absl::Status& lost) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(status_);
  if (const absl::Status obstacle = CheckMayReturnLocked(); !obstacle.ok()) {
    return absl::UnavailableError(absl::StrCat(
        lost.message(), "; the job cannot go on with another process: ", obstacle.message()));
  }
  is_away_ = true;
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status SidecarSession::CheckMayReturnLocked() const {
  const auto no = [](const auto&... why) {
    return absl::FailedPreconditionError(absl::StrCat(why...));
  };
  if (options_.reconnect <= Duration::zero()) return no("THALWEG_RECONNECT is 0");
  if (has_loaded_) return no("a codec's state had just been loaded");
  if (options_.num_nodes > 1 && options_.secret.empty()) return no("it has no secret");
  if (!UsesArenas()) return no("gradients were in the memory of a GPU that it had opened");
  if (collectives_.has_groups()) return no("its groups' collectives are lost");
  for (const auto& [index, entry] : buckets_) {
    const SessionBucket& bucket = *entry.second;
    if (bucket.has_update) return no("aggregators keep its weights");
    // In its first round, other buckets of that layout have perhaps not been announced.
    if (entry.first.generation > 0 && bucket.round < 2) {
      return no("bucket ", ToString(entry.first), " had just got another layout");
    }
  }
  return absl::OkStatus();
}

absl::Status SidecarSession::TryToReturn(TimePoint deadline) {
  THALWEG_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection,
                           Connection::Connect(options_.sidecar_path, deadline));
  const ForkGuard fork_guard([raw = connection.get()] { raw->CloseInChild(); });
  const absl::Status brought = BringAlong(*connection);
  // The last words of a sidecar that has hung up tell why.
  if (!brought.ok() && !absl::IsUnavailable(brought)) return brought;
  THALWEG_RETURN_IF_ERROR(AwaitWelcome(*connection, Now() + options_.timeout));
  return GoOn(connection);  // which the guard needs to its end
}

absl::Status SidecarSession::BringAlong(Connection& connection) {
  struct Kept {
    ipc::KeptBucket message;
    std::shared_ptr<BucketArena> input;
    std::shared_ptr<const BucketArena> result;
    ipc::CodecMemory codec_memory;
    std::shared_ptr<const UniqueFd> codec_memory_fd;
  };
  std::vector<Kept> all;
  {
    MutexLock lock(mutex_);
    for (auto& [index, entry] : buckets_) {
      auto& [id, bucket] = entry;
      const uint64_t complete = bucket->round - (bucket->callback.done == nullptr ? 0 : 1);
      all.push_back({{id, bucket->layout, complete, bucket->nonfinite_elems, bucket->placed.shards,
                      bucket->placed.loads, bucket->codec_memory_fd != nullptr},
                     bucket->input,
                     complete == 0 ? nullptr : bucket->result,
                     bucket->codec_memory,
                     bucket->codec_memory_fd});
      bucket->is_announced = true;
    }
  }
  ipc::Hello hello = hello_;
  hello.compressed_since = stats().compressed_since;
  hello.probe = {};
  hello.chunk_bytes = welcome_.chunk_bytes;
  hello.known = welcome_.terms;
  hello.kept_buckets = static_cast<uint32_t>(all.size());
  THALWEG_RETURN_IF_ERROR(connection.Send(hello));
  for (const Kept& kept : all) {
    THALWEG_RETURN_IF_ERROR(connection.Send(kept.message, kept.input->fd()));
    if (kept.result != nullptr) {
      THALWEG_RETURN_IF_ERROR(connection.Send(ipc::KeptResult{kept.message.id}, kept.result->fd()));
    }
    if (kept.codec_memory_fd != nullptr) {
      THALWEG_RETURN_IF_ERROR(connection.Send(kept.codec_memory, kept.codec_memory_fd->get()));
    }
  }
  return absl::OkStatus();
}

absl::Status SidecarSession::AwaitWelcome(Connection& connection, TimePoint deadline) {
  while (true) {
    auto received = connection.Receive(std::min(deadline, Now() + kLookForSidecar));
    {
      MutexLock lock(mutex_);
      THALWEG_RETURN_IF_ERROR(status_);
    }
    if (absl::IsDeadlineExceeded(received.status()) && Now() < deadline) continue;
    if (absl::IsDeadlineExceeded(received.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat("job '", options_.job, "': the sidecar at ", options_.sidecar_path,
                       " has been restarted, but not taken up the job within ",
                       ToSeconds(options_.timeout), " s"));
    }
    THALWEG_RETURN_IF_ERROR(received.status());
    if (std::holds_alternative<ipc::Welcome>(received->message)) return absl::OkStatus();
    THALWEG_RETURN_IF_ERROR(Handle(*std::move(received)));
  }
}

absl::Status SidecarSession::GoOn(std::shared_ptr<Connection> connection) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(status_);
  std::vector<const SessionBucket*> in_flight;
  for (auto& [index, entry] : buckets_) {
    auto& [id, bucket] = entry;
    if (!std::exchange(bucket->is_announced, true)) {
      const DeviceMemory memory = bucket->lane == nullptr ? DeviceMemory() : bucket->lane->memory();
      THALWEG_RETURN_IF_ERROR(
          connection->Send(ipc::RegisterBucket{id, bucket->layout, memory}, bucket->input->fd()));
    }
    if (bucket->callback.done != nullptr) in_flight.push_back(bucket.get());
  }
  // Before rounds begin, whose residuals are in units of it.
  if (options_.local_rank == 0 && stats_.loss_scale != 0) {
    THALWEG_RETURN_IF_ERROR(connection->Send(ipc::Precision{stats_.loss_scale, 0}));
  }
  // All nodes take buckets in the same order.
  std::sort(in_flight.begin(), in_flight.end(), [](const SessionBucket* a, const SessionBucket* b) {
    return a->submitted < b->submitted;
  });
  for (const SessionBucket* bucket : in_flight) {
    THALWEG_RETURN_IF_ERROR(connection->Send(bucket->submit));
  }
  if (states_.awaits_codec_state()) {
    THALWEG_RETURN_IF_ERROR(connection->Send(ipc::GetCodecState{}));
  }
  ++stats_.sidecar_returns;
  in_child_ = connection.get();
  connection_ = std::move(connection);
  is_away_ = false;
  last_heard_ = last_progress_ = Now();
  changed_.NotifyAll();
  return absl::OkStatus();
}

}  // namespace thalweg
