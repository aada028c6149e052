// SnapshotsForTest is a folder for snapshots, and their writer, below the tests' temporary folder.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/aggregator/snapshot_writer.h"

namespace thalweg {

class SnapshotsForTest {
 public:
  SnapshotsForTest() { Restart(); }
  ~SnapshotsForTest() {
    writer_.reset();
    folder_.reset();
    std::filesystem::remove_all(path_);
  }

  // As when the aggregator is started again.
  void Restart(Duration look = SnapshotWriter::kLook) {
    writer_.reset();
    folder_.reset();
    folder_ = *SnapshotFolder::Open(path_);
    writer_.emplace(*folder_, registry_, look);
  }
  // Waits until nothing of the job is being written; returns what there is then.
  SnapshotReport Await(const std::string& identity) {
    SnapshotReport report = writer_->Report(identity);
    while (report.is_writing) {
      std::this_thread::yield();
      report = writer_->Report(identity);
    }
    return writer_->Report(identity);
  }

  SnapshotWriter& writer() { return *writer_; }
  MetricRegistry& registry() { return registry_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  const std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) /
      absl::StrCat("shard-snapshots-", getpid(), "-",
                   ::testing::UnitTest::GetInstance()->current_test_info()->name());
  MetricRegistry registry_;
  std::unique_ptr<SnapshotFolder> folder_;
  std::optional<SnapshotWriter> writer_;
};

}  // namespace thalweg
