// SnapshotWriter writes snapshots of jobs' weights while the weights are updated.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/snapshots.h"
#include "core/base/thread.h"
#include "server/base/metrics.h"
#include "server/base/outcome_counters.h"
#include "server/round/chunk_states.h"
#include "server/snapshot/snapshot_folder.h"

namespace thalweg {

// Thread-safe. Its thread writes one snapshot after the other, chunk by chunk, and removes those
// that nobody needs. One that cannot be written, for example because the disk is full, is left out:
// that is counted, and logged once until the job has one again.
class SnapshotWriter {
 public:
  // How often it looks for jobs that are to be forgotten.
  static constexpr Duration kLook = std::chrono::hours(1);

  // `folder` and `registry` must outlive it.
  SnapshotWriter(SnapshotFolder& folder, MetricRegistry& registry, Duration look = kLook);
  // Leaves out what has not been written, and waits until what is forgotten has been removed.
  ~SnapshotWriter();

  // Takes turns with Write: returns true if the snapshot has to be written, false if it is being
  // written or has been. FailedPrecondition: another one of the same job is being written.
  absl::StatusOr<bool> Begin(const std::string& identity, const SnapshotId& id);
  // `chunks` have been told that their weights are wanted; see SnapshotCall for `common`.
  void Write(SnapshotHeader header, std::vector<ChunkStates::Chunk> chunks,
             std::optional<SnapshotId> common);

  SnapshotReport Report(const std::string& identity);
  // The job is there until the last copy of the result is gone: it is not forgotten for its age.
  // Waits up to kDiskTime while earlier snapshots of its own are being hidden.
  static constexpr Duration kDiskTime = std::chrono::seconds(2);
  std::shared_ptr<const void> Hold(const std::string& identity);
  // The job is over: it has no snapshots any more, nor the one that is being written. The thread
  // removes the files, which may take seconds.
  void Forget(const std::string& identity);
  SnapshotFolder& folder() { return folder_; }

 private:
  struct Order {
    SnapshotHeader header;
    std::vector<ChunkStates::Chunk> chunks;
    std::optional<SnapshotId> common;
  };

  void WorkLoop();
  // Forgets jobs that are not there and have written nothing for long.
  void ForgetOld();
  void Carry(const Order& order);
  absl::StatusOr<uint64_t> WriteFile(const Order& order);
  // Nothing is being written of the job any more.
  void End(const std::string& identity);
  // Hides the snapshots of a job in leaving_, takes it out there, and has them removed. Other jobs
  // do not wait for the disk.
  void SetAside(const std::string& identity);
  // Returns whether what has been begun of the job is not wanted any more.
  bool IsDropped(const std::string& identity);
  void NoteOutcome(const SnapshotHeader& header, const absl::StatusOr<uint64_t>& bytes,
                   Duration took);

  SnapshotFolder& folder_;
  OutcomeCounters snapshots_;
  Counter& bytes_;
  Histogram& seconds_;
  Gauge& newest_;

  const Duration look_;

  Mutex mutex_;
  CondVar changed_;
  TimePoint next_look_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Order> orders_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> set_aside_ ABSL_GUARDED_BY(mutex_);        // to be removed
  std::map<std::string, SnapshotId> begun_ ABSL_GUARDED_BY(mutex_);  // by identity
  std::set<std::string> forgotten_ ABSL_GUARDED_BY(mutex_);          // of those
  std::set<std::string> leaving_ ABSL_GUARDED_BY(mutex_);            // are being set aside
  std::multimap<std::string, std::weak_ptr<const void>> held_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> failing_ ABSL_GUARDED_BY(mutex_);  // jobs whose latest failed
  Thread thread_;  // declared last, because it uses everything above
};

}  // namespace thalweg
