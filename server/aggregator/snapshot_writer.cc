#include "server/aggregator/snapshot_writer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/base/log.h"

namespace thalweg {

SnapshotWriter::SnapshotWriter(SnapshotFolder& folder, MetricRegistry& registry, Duration look)
    : folder_(folder),
      snapshots_(registry, "thalweg_shard_snapshots_total",
                 "Snapshots of weights, by outcome: ok, or why one was left out"),
      bytes_(registry.GetCounter("thalweg_shard_snapshot_bytes_total",
                                 "Bytes of snapshots that were written")),
      seconds_(
          registry.GetHistogram("thalweg_shard_snapshot_seconds",
                                "Time from the request for a snapshot until it is on the disk")),
      newest_(registry.GetGauge("thalweg_shard_snapshot_timestamp_seconds",
                                "When the latest snapshot was finished, in seconds since 1970")),
      look_(look),
      next_look_(Now() + look),
      thread_("agg-snapshot", [this] { WorkLoop(); }) {}

SnapshotWriter::~SnapshotWriter() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

absl::StatusOr<bool> SnapshotWriter::Begin(const std::string& identity, const SnapshotId& id) {
  {
    MutexLock lock(mutex_);
    const auto [begun, is_new] = begun_.try_emplace(identity, id);
    if (!is_new && begun->second == id) return false;
    if (!is_new) {
      return absl::FailedPreconditionError(
          absl::StrCat(ToString(begun->second), " is still being written"));
    }
  }
  // It may have been finished before it was begun again.
  for (const SnapshotHeader& known : folder_.List(identity)) {
    if (known.id != id) continue;
    End(identity);
    return false;
  }
  return true;
}

void SnapshotWriter::Write(SnapshotHeader header, std::vector<ChunkStates::Chunk> chunks,
                           std::optional<SnapshotId> common) {
  MutexLock lock(mutex_);
  orders_.push_back({std::move(header), std::move(chunks), common});
  changed_.NotifyAll();
}

SnapshotReport SnapshotWriter::Report(const std::string& identity) {
  SnapshotReport report;
  {
    MutexLock lock(mutex_);
    report.is_writing = begun_.contains(identity);
  }
  for (const SnapshotHeader& known : folder_.List(identity)) report.complete.push_back(known.id);
  if (report.complete.size() > kMaxListedSnapshots) {
    report.complete.erase(report.complete.begin(), report.complete.end() - kMaxListedSnapshots);
  }
  return report;
}

std::shared_ptr<const void> SnapshotWriter::Hold(const std::string& identity) {
  auto held = std::make_shared<const char>();
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, Now() + kDiskTime, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !leaving_.contains(identity);
  });
  std::erase_if(held_, [](const auto& entry) { return entry.second.expired(); });
  held_.emplace(identity, held);
  return held;
}

void SnapshotWriter::ForgetOld() {
  for (const std::string& identity : folder_.Forgotten()) {
    {
      MutexLock lock(mutex_);
      std::erase_if(held_, [](const auto& entry) { return entry.second.expired(); });
      if (held_.contains(identity) || !leaving_.insert(identity).second) continue;
    }
    SetAside(identity);
  }
}

void SnapshotWriter::Forget(const std::string& identity) {
  {
    MutexLock lock(mutex_);
    if (begun_.contains(identity)) {
      forgotten_.insert(identity);
      return;
    }
    if (!leaving_.insert(identity).second) return;
  }
  SetAside(identity);
}

void SnapshotWriter::SetAside(const std::string& identity) {
  std::string aside = folder_.SetAside(identity);
  MutexLock lock(mutex_);
  leaving_.erase(identity);
  if (!aside.empty()) set_aside_.push_back(std::move(aside));
  changed_.NotifyAll();
}

void SnapshotWriter::WorkLoop() {
  while (true) {
    std::optional<Order> order;
    std::string aside;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, next_look_, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !orders_.empty() || !set_aside_.empty();
      });
      if (!stopping_ && !orders_.empty()) {
        order = std::move(orders_.front());
        orders_.pop_front();
      } else if (!set_aside_.empty()) {
        aside = std::move(set_aside_.front());
        set_aside_.pop_front();
      } else if (stopping_) {
        return;
      } else {
        next_look_ = Now() + look_;
      }
    }
    if (order) {
      Carry(*order);
    } else if (!aside.empty()) {
      SnapshotFolder::RemoveSetAside(aside);
    } else {
      ForgetOld();
    }
  }
}

void SnapshotWriter::Carry(const Order& order) {
  const TimePoint began = Now();
  const std::string identity = order.header.identity;
  const absl::StatusOr<uint64_t> bytes = WriteFile(order);
  // What has not been written still wants its chunks.
  for (const ChunkStates::Chunk& chunk : order.chunks) chunk.state->FetchWanted();
  if (bytes.ok()) folder_.Prune(identity, order.common);
  NoteOutcome(order.header, bytes, Now() - began);
  End(identity);
}

void SnapshotWriter::End(const std::string& identity) {
  {
    MutexLock lock(mutex_);
    begun_.erase(identity);
    if (forgotten_.erase(identity) == 0 || !leaving_.insert(identity).second) return;
  }
  SetAside(identity);
}

absl::StatusOr<uint64_t> SnapshotWriter::WriteFile(const Order& order) {
  THALWEG_ASSIGN_OR_RETURN(SnapshotFile file, folder_.Create(order.header));
  for (const ChunkStates::Chunk& chunk : order.chunks) {
    if (IsDropped(order.header.identity)) return absl::CancelledError("nobody needs it any more");
    THALWEG_RETURN_IF_ERROR(file.Add({chunk.bucket, chunk.number, chunk.state->FetchWanted()}));
  }
  THALWEG_RETURN_IF_ERROR(file.Commit());
  return file.bytes();
}

bool SnapshotWriter::IsDropped(const std::string& identity) {
  MutexLock lock(mutex_);
  return stopping_ || forgotten_.contains(identity);
}

void SnapshotWriter::NoteOutcome(const SnapshotHeader& header,
                                 const absl::StatusOr<uint64_t>& bytes, Duration took) {
  if (absl::IsCancelled(bytes.status())) return;  // nobody has needed it any more
  snapshots_.Add(bytes.status().code());
  MutexLock lock(mutex_);
  if (bytes.ok()) {
    bytes_.Add(static_cast<double>(*bytes));
    seconds_.Observe(ToSeconds(took));
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    newest_.Set(std::chrono::duration<double>(now).count());
    failing_.erase(header.identity);
  } else if (failing_.insert(header.identity).second) {
    spdlog::error("job '{}': {} is left out, and the job goes on without it: {}", header.job,
                  ToString(header.id), Text(bytes.status()));
  }
}

}  // namespace thalweg
