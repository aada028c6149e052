#include "server/snapshot/snapshot_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg::snapshot_folder_test {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kOurs(32, '\x01'), kTheirs(32, '\x02');

class SnapshotFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = fs::path(::testing::TempDir()) /
            absl::StrCat("snapshots-", getpid(), "-",
                         ::testing::UnitTest::GetInstance()->current_test_info()->name());
    Open();
  }
  void TearDown() override { fs::remove_all(path_); }

  void Open() {
    folder_.reset();
    auto opened = SnapshotFolder::Open(path_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    folder_ = *std::move(opened);
  }
  void Take(const SnapshotId& id, const std::string& identity = kOurs) {
    auto file = folder_->Create({.job = "job", .identity = identity, .id = id, .num_chunks = 1});
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Add({{}, 0, {{1.0f}, {}, id.step}}).ok());
    ASSERT_TRUE(file->Commit().ok());
  }
  std::vector<SnapshotId> Listed(const std::string& identity = kOurs) {
    std::vector<SnapshotId> ids;
    for (const SnapshotHeader& header : folder_->List(identity)) ids.push_back(header.id);
    return ids;
  }
  // Returns where the only file with this name lies.
  fs::path Find(const std::string& name) const {
    for (const auto& entry : fs::recursive_directory_iterator(path_)) {
      if (entry.path().filename() == name) return entry.path();
    }
    return {};
  }

  fs::path path_;
  std::unique_ptr<SnapshotFolder> folder_;
};

// Puts a link to itself where something is, which cannot be read any more: the system says ELOOP.
class Unreadable {
 public:
  explicit Unreadable(fs::path path) : path_(std::move(path)) {
    fs::rename(path_, aside_);
    fs::create_symlink(path_.filename(), path_);
  }
  ~Unreadable() {
    fs::remove(path_);
    fs::rename(aside_, path_);
  }
  Unreadable(const Unreadable&) = delete;
  Unreadable& operator=(const Unreadable&) = delete;

 private:
  const fs::path path_;
  const fs::path aside_ = path_.string() + ".aside";
};

// Keeps what is logged while it exists.
class CapturedLog {
 public:
  CapturedLog() {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)));
  }
  ~CapturedLog() { spdlog::set_default_logger(before_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  // Returns how many lines have been logged with this text since the last call.
  int Count(const std::string& text) {
    std::istringstream lines(text_.str());
    text_.str("");
    int count = 0;
    for (std::string line; std::getline(lines, line);) count += line.find(text) != line.npos;
    return count;
  }

 private:
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream text_;
};

TEST_F(SnapshotFolderTest, SnapshotsAreListedInOrderByJobAlsoAfterARestart) {
  Take({0, 30});
  Take({1, 20});
  Take({0, 100});
  Take({5, 5}, kTheirs);
  Open();
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 30}, SnapshotId{0, 100}, SnapshotId{1, 20}));
  EXPECT_THAT(Listed(kTheirs), ElementsAre(SnapshotId{5, 5}));
  const auto snapshot = folder_->Read(kOurs, {0, 100});
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->chunks[0].weights.steps, 100u);
}

TEST_F(SnapshotFolderTest, TwoNewestAreKeptAndWhatAllShardsHaveAndTheOneBefore) {
  for (uint64_t step = 10; step <= 70; step += 10) Take({0, step});
  folder_->Prune(kOurs, SnapshotId{0, 40});
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 30}, SnapshotId{0, 40}, SnapshotId{0, 60},
                                    SnapshotId{0, 70}));
  folder_->Prune(kOurs, SnapshotId{0, 70});
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 60}, SnapshotId{0, 70}));
  folder_->Prune(kOurs, std::nullopt);
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 60}, SnapshotId{0, 70}));
}

TEST_F(SnapshotFolderTest, SnapshotsLaterThanTheRestoredOneAreDropped) {
  Take({0, 10});
  Take({0, 20});
  Take({1, 5});
  folder_->DropLater(kOurs, {0, 10});
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}));
}

TEST_F(SnapshotFolderTest, OtherUsersCannotReadWeights) {
  Take({0, 10});
  const fs::perms others = fs::perms::group_all | fs::perms::others_all;
  EXPECT_EQ(fs::status(Find("0-10.snapshot").parent_path()).permissions() & others,
            fs::perms::none);
}

TEST_F(SnapshotFolderTest, OtherUsersHaveNoTimeToLookIntoANewFolder) {
  const int changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  ASSERT_GE(inotify_add_watch(changes, path_.c_str(), IN_ATTRIB), 0);
  Take({0, 10});  // its folder has its permissions from the beginning
  char change[256];
  EXPECT_EQ(read(changes, change, sizeof change), -1);
  EXPECT_EQ(errno, EAGAIN);
  close(changes);
}

TEST_F(SnapshotFolderTest, JobThatIsOverLeavesNothing) {
  Take({0, 10});
  Take({0, 10}, kTheirs);
  const std::string aside = folder_->SetAside(kOurs);
  EXPECT_THAT(Listed(), IsEmpty());
  // Its next run need not wait until they are gone.
  Take({0, 20});
  SnapshotFolder::RemoveSetAside(aside);
  EXPECT_FALSE(fs::exists(aside));
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 20}));
  EXPECT_THAT(Listed(kTheirs), ElementsAre(SnapshotId{0, 10}));
  EXPECT_EQ(folder_->SetAside("nobody"), "");
}

TEST_F(SnapshotFolderTest, WhatWasSetAsideIsGoneAfterARestart) {
  Take({0, 10});
  const std::string aside = folder_->SetAside(kOurs);
  EXPECT_TRUE(fs::exists(aside));
  Open();
  EXPECT_FALSE(fs::exists(aside));
}

TEST_F(SnapshotFolderTest, DamagedFileIsRefusedWhenItIsReadAndNotListedAgain) {
  Take({0, 10});
  Take({0, 20});
  const fs::path damaged = Find("0-20.snapshot");
  fs::resize_file(damaged, fs::file_size(damaged) - 1);
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}, SnapshotId{0, 20}));  // its header is whole
  const absl::Status status = folder_->Read(kOurs, {0, 20}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("0-20.snapshot is cut off"));
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}));
}

TEST_F(SnapshotFolderTest, FileThatCannotBeReadForAMomentIsListedLater) {
  Take({0, 5});
  Take({0, 6});
  CapturedLog log;
  for (int time = 0; time < 2; ++time) {
    {
      Unreadable file(Find("0-6.snapshot"));
      EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 5}));
      EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 5}));
      EXPECT_EQ(log.Count("0-6.snapshot"), 1);
    }
    EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 5}, SnapshotId{0, 6}));
  }
}

TEST_F(SnapshotFolderTest, FolderThatCannotBeListedForAMomentIsNamed) {
  Take({0, 5});
  const std::string why = "cannot list " + Find("0-5.snapshot").parent_path().string();
  CapturedLog log;
  {
    Unreadable folder(Find("0-5.snapshot").parent_path());
    EXPECT_THAT(Listed(), IsEmpty());
    EXPECT_THAT(Listed(), IsEmpty());
    EXPECT_EQ(log.Count(why), 1);
  }
  {
    Unreadable all(path_);
    EXPECT_THAT(folder_->Forgotten(), IsEmpty());
    EXPECT_EQ(log.Count("cannot list " + path_.string() + ":"), 1);
  }
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 5}));
  EXPECT_THAT(Listed(kTheirs), IsEmpty());
  EXPECT_EQ(log.Count(""), 0);  // a job without any
}

TEST_F(SnapshotFolderTest, FileOfAJobThatIsOverIsNotTakenForOneThatWasDamaged) {
  Take({0, 10});
  std::ofstream(Find("0-10.snapshot")) << "anything";
  EXPECT_THAT(Listed(), IsEmpty());
  SnapshotFolder::RemoveSetAside(folder_->SetAside(kOurs));
  Take({0, 10});
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}));
}

TEST_F(SnapshotFolderTest, FilesOfOthersAreNotListed) {
  Take({0, 10});
  Take({0, 20}, kTheirs);
  const fs::path ours = Find("0-10.snapshot"), theirs = Find("0-20.snapshot");
  fs::copy_file(theirs, ours.parent_path() / "0-20.snapshot");
  fs::copy_file(ours, ours.parent_path() / "0-30.snapshot");  // under another name
  std::ofstream(ours.parent_path() / "0-40.snapshot") << "anything";
  std::ofstream(ours.parent_path() / "notes.txt") << "anything";
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}));
}

TEST_F(SnapshotFolderTest, UnfinishedFilesAreRemovedWhenTheFolderIsOpened) {
  Take({0, 10});
  const fs::path unfinished = Find("0-10.snapshot").parent_path() / "0-20.snapshot.unfinished";
  std::ofstream(unfinished) << "half a";
  Open();
  EXPECT_FALSE(fs::exists(unfinished));
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}));
}

// Makes the path, and all in it, look as if nothing had been written there for a week.
void Age(const fs::path& path) {
  const auto then = fs::file_time_type::clock::now() - SnapshotFolder::kForgottenAfter;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    fs::last_write_time(entry.path(), then);
  }
  fs::last_write_time(path, then);
}

TEST_F(SnapshotFolderTest, JobsThatHaveWrittenNothingForAWeekAreForgotten) {
  Take({0, 10});
  Take({0, 20}, kTheirs);
  Age(Find("0-10.snapshot").parent_path());
  Open();
  EXPECT_THAT(Listed(), IsEmpty());
  EXPECT_THAT(Listed(kTheirs), ElementsAre(SnapshotId{0, 20}));
}

TEST_F(SnapshotFolderTest, NewSnapshotKeepsAJobsFolderThatLooksOld) {
  Take({0, 10});
  const fs::path file = Find("0-10.snapshot");
  Age(file.parent_path());
  fs::last_write_time(file, fs::file_time_type::clock::now());
  Open();
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}));
}

TEST_F(SnapshotFolderTest, WhatIsNoJobsStaysHoweverOldItIs) {
  Take({0, 10});
  const fs::path ours = Find("0-10.snapshot").parent_path();
  const fs::path others[] = {path_ / "data" / "movie.unfinished",
                             path_ / "b" / ours.filename() / "0-10.snapshot",
                             path_ / std::string(64, 'a') / "notes.txt", ours / "notes.txt"};
  for (const fs::path& path : others) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "anything";
  }
  Age(path_);
  Open();
  for (const fs::path& path : others) EXPECT_TRUE(fs::exists(path)) << path;
  EXPECT_THAT(Listed(), ElementsAre(SnapshotId{0, 10}));
}

TEST_F(SnapshotFolderTest, FolderIsOneProcesss) {
  const absl::Status second = SnapshotFolder::Open(path_).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr("give each a folder of its own"));
  EXPECT_THAT(std::string(SnapshotFolder::Open("/proc/snapshots").status().message()),
              HasSubstr("cannot keep snapshots in /proc/snapshots: "));
}

}  // namespace
}  // namespace thalweg::snapshot_folder_test
