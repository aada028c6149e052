// A snapshot file holds what one shard keeps of a job's weights at one step. docs/snapshots.md has
// its format.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/layout.h"
#include "core/base/snapshots.h"
#include "core/base/update.h"

namespace thalweg {

struct SnapshotHeader {
  std::string job;
  std::string identity;  // see JoinRequest
  SnapshotId id;
  uint32_t shard = 0;
  uint32_t num_shards = 0;
  uint64_t chunk_bytes = 0;
  std::vector<uint32_t> shares = {};             // of the job's first shard; see Terms
  std::map<BucketId, std::string> buckets = {};  // each one's description
  uint64_t num_chunks = 0;

  bool operator==(const SnapshotHeader&) const = default;
};

struct SnapshotChunk {
  BucketId bucket;
  uint32_t chunk = 0;
  Weights weights;

  bool operator==(const SnapshotChunk&) const = default;
};

struct Snapshot {
  SnapshotHeader header;
  std::vector<SnapshotChunk> chunks;
};

// A SnapshotFile is one that is being written: beside its place, until Commit puts it there, so
// that what is in a place is whole. Its destructor removes what has not been committed.
// Thread-compatible. Errors name the file; ResourceExhausted: its disk is full.
class SnapshotFile {
 public:
  static absl::StatusOr<SnapshotFile> Create(const std::string& path, const SnapshotHeader& header);
  SnapshotFile(SnapshotFile&&) = default;
  ~SnapshotFile();

  // Call header.num_chunks times.
  absl::Status Add(const SnapshotChunk& chunk);
  // After it the file survives a crash of the machine.
  absl::Status Commit();
  uint64_t bytes() const { return bytes_; }

 private:
  using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

  SnapshotFile(std::string path, File file) : path_(std::move(path)), file_(std::move(file)) {}
  absl::Status Write(const std::string& bytes);
  absl::Status WriteRecord(const std::string& record);

  std::string path_;
  File file_;  // null once it is committed, or has been moved from
  uint64_t bytes_ = 0;
};

// Makes what has happened to `path`, a name in a folder, survive a crash of the machine.
absl::Status SyncFolderOf(const std::string& path);

// The ending of files that are being written.
inline constexpr char kUnfinished[] = ".unfinished";

// Both refuse a file that cannot be used, by name: NotFound (there is none), FailedPrecondition (it
// is no snapshot, or of a later release), DataLoss (it is cut off or damaged). The first reads the
// header alone.
absl::StatusOr<SnapshotHeader> ReadSnapshotHeader(const std::string& path);
absl::StatusOr<Snapshot> ReadSnapshot(const std::string& path);

}  // namespace thalweg
