#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <string>

#include "server/aggregator/job_test_util.h"
#include "server/aggregator/snapshot_test_util.h"

namespace thalweg::job_snapshots_test {
namespace {

using Action = SnapshotAction;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kElems = 600;
const std::string kIdentity(32, 'k');

// A job of one node, whose gradients are ones and whose learning rate is one: an update takes one
// off each weight.
class Training {
 public:
  explicit Training(SnapshotWriter* snapshots, const std::string& tensor = "w",
                    uint64_t memory = TestJob::kPlenty,
                    const std::vector<TestJob::Rounds>& rounds = {})
      : test_({1}, memory, rounds, snapshots) {
    BucketAnnouncement bucket{{}, {DType::kFloat32, {{tensor, {static_cast<int64_t>(kElems)}}}}};
    bucket.update = UpdateRule{.groups = {0}};
    EXPECT_TRUE(test_.job().RegisterBucket(0, bucket).ok());
    EXPECT_TRUE(test_.job().SetSettings(0, 1, {{{.lr = 1}}}).ok());
  }

  absl::Status Write(float value) {
    return test_.job().WriteWeights(0, {}, 0, 0, {Floats(kElems, value), 0});
  }
  absl::Status Update() {
    const Floats ones(kElems, 1);
    Bytes bytes(ones.size() * sizeof(float));
    std::memcpy(bytes.data(), ones.data(), bytes.size());
    Contribution contribution{{{}, 0, ++round_}, 1, WireFormat::kFloat32, kElems, Split(bytes, {})};
    contribution.settings = 1;
    return test_.job().Contribute(0, std::move(contribution), Now());
  }
  absl::StatusOr<SnapshotReport> Call(Action action, const SnapshotId& id = {}) {
    return test_.job().Snapshots(0, {action, id});
  }
  WeightsSlice Weights() { return *test_.job().ReadWeights(0, {}, 0, 0); }
  TestJob& test() { return test_; }

 private:
  TestJob test_;
  uint64_t round_ = 0;
};

// Leaves the snapshot of step 0 of a job that has vanished.
void TakeOne(SnapshotsForTest& snapshots) {
  Training training(&snapshots.writer());
  ASSERT_TRUE(training.Write(10).ok());
  ASSERT_TRUE(training.Call(Action::kTake, {0, 0}).ok());
  snapshots.Await(kIdentity);
}

TEST(JobSnapshotsTest, SnapshotHasTheWeightsOfItsStepThoughUpdatesGoOn) {
  SnapshotsForTest snapshots;
  Training training(&snapshots.writer());
  ASSERT_TRUE(training.Write(10).ok());
  ASSERT_TRUE(training.Update().ok());
  ASSERT_TRUE(training.Call(Action::kTake, {0, 1}).ok());
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(training.Update().ok());
  EXPECT_THAT(snapshots.Await(kIdentity).complete, ElementsAre(SnapshotId{0, 1}));

  snapshots.Restart();
  Training after(&snapshots.writer());
  EXPECT_THAT(after.Call(Action::kList)->complete, ElementsAre(SnapshotId{0, 1}));
  ASSERT_TRUE(after.Call(Action::kRestore, {0, 1}).ok());
  EXPECT_EQ(after.Weights(), (WeightsSlice{Floats(kElems, 9), 1}));
  ASSERT_TRUE(after.Update().ok());
  EXPECT_EQ(after.Weights(), (WeightsSlice{Floats(kElems, 8), 2}));
}

TEST(JobSnapshotsTest, LaterSnapshotsAreGoneWhenOneIsRestored) {
  SnapshotsForTest snapshots;
  Training training(&snapshots.writer());
  ASSERT_TRUE(training.Write(10).ok());
  for (uint64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(training.Update().ok());
    ASSERT_TRUE(training.Call(Action::kTake, {0, step}).ok());
    snapshots.Await(kIdentity);
  }
  const auto restored = training.Call(Action::kRestore, {0, 1});
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_THAT(restored->complete, ElementsAre(SnapshotId{0, 1}));
  EXPECT_THAT(training.Weights().values, Each(9));
}

TEST(JobSnapshotsTest, ShardWithoutAFolderSaysHowToGetOne) {
  SnapshotsForTest snapshots;
  Training with(&snapshots.writer()), without(nullptr);
  EXPECT_THAT(std::string(without.Call(Action::kList).status().message()),
              HasSubstr("a job without a secret"));
  JoinRequest request = without.test().job().first();
  request.identity = kIdentity;
  request.workers = 1;
  MetricRegistry registry;
  ShardMetrics metrics(registry);
  MemoryBudget memory(TestJob::kPlenty, metrics.memory_reserved_bytes);
  FaultLog faults;
  Job job(request, 64, memory, metrics, faults);
  const absl::Status member = job.AddMember(request, std::make_shared<ListSink>(), Now());
  ASSERT_TRUE(member.ok()) << member;
  const absl::Status status = job.Snapshots(0, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("shard 0 keeps no snapshots: start it with --state-dir"));
}

TEST(JobSnapshotsTest, SnapshotOfOtherWeightsIsRefusedByName) {
  SnapshotsForTest snapshots;
  Training training(&snapshots.writer());
  ASSERT_TRUE(training.Write(10).ok());
  ASSERT_TRUE(training.Call(Action::kTake, {0, 0}).ok());
  snapshots.Await(kIdentity);
  Training other(&snapshots.writer(), "v");
  const absl::Status status = other.Call(Action::kRestore, {0, 0}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("bucket 0: expected v [600] of group 0, got w [600] of group 0"));
  EXPECT_EQ(other.Call(Action::kRestore, {0, 7}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(JobSnapshotsTest, SnapshotOfBucketsThatTheJobHasNotIsNotRead) {
  SnapshotsForTest snapshots;
  ASSERT_NO_FATAL_FAILURE(TakeOne(snapshots));
  for (const auto& entry : std::filesystem::recursive_directory_iterator(snapshots.path())) {
    if (entry.path().extension() != ".snapshot") continue;
    std::filesystem::resize_file(entry, entry.file_size() - 1);  // whoever reads it finds that
  }
  TestJob without({1}, TestJob::kPlenty, {}, &snapshots.writer());
  const absl::Status status = without.job().Snapshots(0, {Action::kRestore, {0, 0}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("it also has bucket 0"));
}

// A SlowFile takes the place of a job's only snapshot, and is read when the test says so.
class SlowFile {
 public:
  explicit SlowFile(SnapshotsForTest& snapshots) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(snapshots.path())) {
      if (entry.path().extension() == ".snapshot") path_ = entry.path();
    }
    std::ifstream file(path_, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    std::ofstream(path_) << "anything";  // so that it is not listed, for which it would be read
    EXPECT_THAT(snapshots.writer().Report(kIdentity).complete, IsEmpty());
    MakePipe();
  }

  // Waits until somebody reads, does something, and gives what there is to be read.
  void LetRead(const std::function<void()>& before = [] {}) {
    int fd = -1;
    const TimePoint deadline = Now() + kTestPatience;
    while (fd < 0 && Now() < deadline) {  // ENXIO: nobody reads yet
      fd = open(path_.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    }
    ASSERT_GE(fd, 0);
    ASSERT_EQ(fcntl(fd, F_SETFL, 0), 0);
    MakePipe();  // for the next reader
    before();
    ASSERT_EQ(write(fd, bytes_.data(), bytes_.size()), static_cast<ssize_t>(bytes_.size()));
    close(fd);
  }

 private:
  void MakePipe() {
    std::filesystem::remove(path_);
    EXPECT_EQ(mkfifo(path_.c_str(), S_IRUSR | S_IWUSR), 0);
  }

  std::filesystem::path path_;
  std::string bytes_;
};

TEST(JobSnapshotsTest, JobThatFailsWhileItsSnapshotIsReadSaysWhyItHasFailed) {
  for (const bool has_read_the_header : {false, true}) {
    SnapshotsForTest snapshots;
    ASSERT_NO_FATAL_FAILURE(TakeOne(snapshots));
    SlowFile file(snapshots);
    Training training(&snapshots.writer());
    auto restored = std::async(std::launch::async, [&training] {
      return training.Call(Action::kRestore, {0, 0}).status();
    });
    if (has_read_the_header) file.LetRead();
    file.LetRead([&training] {
      training.test().job().RemoveMember(0, absl::AbortedError("its worker is gone"));
    });
    const absl::Status status = restored.get();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("its worker is gone"));
  }
}

TEST(JobSnapshotsTest, RestartedShardHasNothingToTakeAndSaysThatItHasLostWeights) {
  SnapshotsForTest snapshots;
  Training training(&snapshots.writer(), "w", TestJob::kPlenty, {{{{}, {1}}}});
  EXPECT_TRUE(absl::IsDataLoss(training.Call(Action::kTake, {0, 1}).status()));
  EXPECT_THAT(training.Call(Action::kList)->complete, IsEmpty());
}

TEST(JobSnapshotsTest, CopiesForSnapshotsNeedMemoryAsTheStateDoes) {
  SnapshotsForTest snapshots;
  Training training(&snapshots.writer());
  ASSERT_TRUE(training.Write(10).ok());
  const double before = training.test().Metric("thalweg_shard_memory_reserved_bytes");
  ASSERT_TRUE(training.Call(Action::kTake, {0, 0}).ok());
  // A weight and a moment, in float32.
  EXPECT_EQ(training.test().Metric("thalweg_shard_memory_reserved_bytes"),
            before + 2 * sizeof(float) * kElems);
}

TEST(JobSnapshotsTest, JobThatEndsWellLeavesNoSnapshotsAndOneThatFailsDoes) {
  SnapshotsForTest snapshots;
  for (const bool fails : {true, false}) {
    Training training(&snapshots.writer());
    ASSERT_TRUE(training.Write(10).ok());
    ASSERT_TRUE(training.Call(Action::kTake, {fails ? 0u : 1u, 0}).ok());
    snapshots.Await(kIdentity);
    training.test().job().RemoveMember(
        0, fails ? absl::AbortedError("its worker is gone") : absl::OkStatus());
    EXPECT_EQ(snapshots.writer().Report(kIdentity).complete.empty(), !fails);
  }
}

TEST(JobSnapshotsTest, JobThatWentBackToASnapshotAndEndsWellLeavesNone) {
  SnapshotsForTest snapshots;
  ASSERT_NO_FATAL_FAILURE(TakeOne(snapshots));
  Training training(&snapshots.writer());
  ASSERT_TRUE(training.Call(Action::kRestore, {0, 0}).ok());
  training.test().job().RemoveMember(0, absl::OkStatus());
  EXPECT_THAT(snapshots.writer().Report(kIdentity).complete, IsEmpty());
}

}  // namespace
}  // namespace thalweg::job_snapshots_test
