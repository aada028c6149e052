#include "server/aggregator/snapshot_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/strings/escaping.h"
#include "core/base/testing/test_patience.h"
#include "server/aggregator/snapshot_test_util.h"

namespace thalweg::snapshot_writer_test {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const std::string kIdentity(32, 'k');

class SnapshotWriterTest : public ::testing::Test {
 protected:
  SnapshotWriterTest() { Set(0); }

  void Set(float value) {
    MutexLock lock(state_->mutex);
    state_->WeightsToChange() = {{value}, {}, 1};
  }
  bool Take(uint64_t step) {
    const SnapshotId id{0, step};
    const auto begun = test_.writer().Begin(kIdentity, id);
    EXPECT_TRUE(begun.ok()) << begun.status();
    if (!begun.ok() || !*begun) return false;
    state_->WantWeights();
    SnapshotHeader header{.job = "job", .identity = kIdentity, .id = id, .num_chunks = 1};
    test_.writer().Write(header, {{{}, 0, state_}}, std::nullopt);
    return true;
  }
  double Counted(absl::StatusCode code) {
    return OutcomeCounters(test_.registry(), "thalweg_shard_snapshots_total", "").Value(code);
  }

  int NumSetAside() const {
    const fs::directory_iterator folders(test_.path());
    return static_cast<int>(std::count_if(begin(folders), end(folders), [](const auto& folder) {
      return folder.path().filename().string().find(".over-") != std::string::npos;
    }));
  }

  SnapshotsForTest test_;
  const std::shared_ptr<ChunkState> state_ = std::make_shared<ChunkState>(1);
};

TEST_F(SnapshotWriterTest, SnapshotsAreOnTheDiskWhenNothingIsBeingWritten) {
  Set(5);
  ASSERT_TRUE(Take(10));
  EXPECT_THAT(test_.Await(kIdentity).complete, ElementsAre(SnapshotId{0, 10}));
  test_.Restart();
  const auto snapshot = test_.writer().folder().Read(kIdentity, {0, 10});
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_THAT(snapshot->chunks[0].weights.params, ElementsAre(5));
  EXPECT_EQ(Counted(absl::StatusCode::kOk), 1);
}

TEST_F(SnapshotWriterTest, RepeatedRequestIsTheSameSnapshot) {
  ASSERT_TRUE(Take(10));
  EXPECT_FALSE(Take(10));
  test_.Await(kIdentity);
  EXPECT_FALSE(Take(10));
  EXPECT_EQ(Counted(absl::StatusCode::kOk), 1);
}

TEST_F(SnapshotWriterTest, FullDiskLeavesOneSnapshotOutAndNothingBehind) {
  const fs::path folder = test_.path() / absl::BytesToHexString(kIdentity);
  fs::create_directories(folder);
  fs::create_symlink("/dev/full", folder / "0-10.snapshot.unfinished");
  ASSERT_TRUE(Take(10));
  EXPECT_THAT(test_.Await(kIdentity).complete, IsEmpty());
  EXPECT_EQ(Counted(absl::StatusCode::kResourceExhausted), 1);
  EXPECT_TRUE(fs::is_empty(folder));
  Set(6);
  EXPECT_EQ(state_->FetchWanted(), Weights());  // the weights are not wanted any more
  ASSERT_TRUE(Take(20));
  EXPECT_THAT(test_.Await(kIdentity).complete, ElementsAre(SnapshotId{0, 20}));
}

TEST_F(SnapshotWriterTest, ForgottenJobLeavesNoSnapshotThatIsBeingWritten) {
  ASSERT_TRUE(Take(10));
  test_.writer().Forget(kIdentity);
  test_.Await(kIdentity);
  EXPECT_FALSE(fs::exists(test_.path() / absl::BytesToHexString(kIdentity)));
}

TEST_F(SnapshotWriterTest, JobThatHasWrittenNothingForAWeekIsForgottenUnlessItIsThere) {
  test_.Restart(std::chrono::milliseconds(1));
  const auto held = test_.writer().Hold(kIdentity);
  ASSERT_TRUE(Take(10));
  test_.Await(kIdentity);
  const fs::path ours = test_.path() / absl::BytesToHexString(kIdentity);
  const fs::path theirs = test_.path() / absl::BytesToHexString(std::string(32, 'o'));
  fs::copy(ours, theirs);
  const auto then = fs::file_time_type::clock::now() - SnapshotFolder::kForgottenAfter;
  for (const fs::path& folder : {ours, theirs}) {
    fs::last_write_time(folder / "0-10.snapshot", then);
    fs::last_write_time(folder, then);
  }
  const TimePoint deadline = Now() + kTestPatience;
  while (fs::exists(theirs) && Now() < deadline) std::this_thread::yield();
  EXPECT_FALSE(fs::exists(theirs));
  EXPECT_TRUE(fs::exists(ours));
}

// Whoever ends a job has others to serve: removing files may take seconds.
TEST_F(SnapshotWriterTest, FilesOfAForgottenJobAreRemovedByTheThreadThatWrites) {
  ASSERT_TRUE(Take(10));
  test_.Await(kIdentity);
  const std::string other(32, 'o');
  const auto begun = test_.writer().Begin(other, {0, 1});
  ASSERT_TRUE(begun.ok() && *begun);
  state_->WantWeights();
  {
    MutexLock lock(state_->mutex);  // the thread waits for it
    test_.writer().Write({.job = "other", .identity = other, .id = {0, 1}, .num_chunks = 1},
                         {{{}, 0, state_}}, std::nullopt);
    test_.writer().Forget(kIdentity);
    EXPECT_THAT(test_.writer().Report(kIdentity).complete, IsEmpty());
    EXPECT_EQ(NumSetAside(), 1);
  }
  test_.Restart();
  EXPECT_EQ(NumSetAside(), 0);
}

}  // namespace
}  // namespace thalweg::snapshot_writer_test
