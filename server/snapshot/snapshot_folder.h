// SnapshotFolder is where a shard keeps the snapshots of its jobs.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/base/snapshots.h"
#include "server/snapshot/snapshot_file.h"

namespace thalweg {

// Jobs are told apart by their identities, which are not empty. A SnapshotFolder is thread-safe;
// it belongs to one process at a time.
class SnapshotFolder {
 public:
  // Jobs whose last snapshot is older are forgotten: nobody comes back. When the folder is opened,
  // they are removed.
  static constexpr std::chrono::hours kForgottenAfter{7 * 24};

  // Opens the folder, which it makes if there is none, and removes what was not finished there.
  // FailedPrecondition: another process has it open; Internal: it cannot be written.
  static absl::StatusOr<std::unique_ptr<SnapshotFolder>> Open(const std::string& path);
  ~SnapshotFolder();
  SnapshotFolder(const SnapshotFolder&) = delete;
  SnapshotFolder& operator=(const SnapshotFolder&) = delete;

  // Begins a snapshot of the job, which is not listed before it is committed.
  absl::StatusOr<SnapshotFile> Create(const SnapshotHeader& header);

  // Returns the headers of the job's snapshots, from the oldest on. A file that cannot be used is
  // left out, and named in the log, once; so is a folder that cannot be listed.
  std::vector<SnapshotHeader> List(const std::string& identity);
  // Reads the header of a snapshot alone.
  absl::StatusOr<SnapshotHeader> ReadHeader(const std::string& identity, const SnapshotId& id);
  // Reads a snapshot. A file that turns out to be damaged is not listed any more.
  absl::StatusOr<Snapshot> Read(const std::string& identity, const SnapshotId& id);

  // Returns the identities of jobs that are forgotten by now.
  std::vector<std::string> Forgotten() const;
  // Removes all of the job's but the two newest, and `common` and the one before it.
  void Prune(const std::string& identity, const std::optional<SnapshotId>& common);
  // Removes those later than `id`: the job goes on from there.
  void DropLater(const std::string& identity, const SnapshotId& id);
  // Hides all of the job's, which is over and needs none any more, and returns where they are;
  // empty if there are none. That is quick; removing them may take seconds.
  std::string SetAside(const std::string& identity);
  // Removes what was set aside.
  static void RemoveSetAside(const std::string& path);

 private:
  SnapshotFolder(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}

  std::string FolderOf(const std::string& identity) const;
  std::string PathOf(const std::string& identity, const SnapshotId& id) const;
  // Logs why a file is not used, unless it has done so.
  void Refuse(const std::string& path, const absl::Status& why);
  // Logs why a file or folder cannot be read for now, once until it can be read, or is gone.
  void NoteRead(const std::string& path, const absl::Status& status);
  void Remove(const std::string& identity, const SnapshotId& id);

  const std::string path_;
  const int lock_;  // a descriptor whose lock ends with the process

  Mutex mutex_;
  // Paths, until the job is over; the second for want of descriptors and such.
  std::set<std::string> refused_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> unread_ ABSL_GUARDED_BY(mutex_);
  uint64_t set_aside_ ABSL_GUARDED_BY(mutex_) = 0;  // how often that was done
};

}  // namespace thalweg
