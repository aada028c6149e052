#include "server/snapshot/snapshot_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace thalweg::snapshot_file_test {
namespace {

using ::testing::HasSubstr;

const SnapshotHeader kHeader{.job = "job",
                             .identity = "key",
                             .id = {3, 70},
                             .shard = 1,
                             .num_shards = 2,
                             .chunk_bytes = 4096,
                             .shares = {360'360, 360'360},
                             .buckets = {{{0, 0, 0}, "w"}, {{7, 1, 0}, "b"}},
                             .num_chunks = 2};
const SnapshotChunk kWhole{{0, 0, 0}, 5, {{1, 2, 3}, {{{4, 5, 6}, {7, 8, 9}}}, 70}};
const SnapshotChunk kWithoutMoments{{7, 1, 0}, 0, {{-1}, {}, 70}};

class SnapshotFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              absl::StrCat("snapshot-file-", getpid(), "-",
                           ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    path_ = folder_ / "3-70.snapshot";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::Status Write() {
    absl::StatusOr<SnapshotFile> file = SnapshotFile::Create(path_, kHeader);
    if (!file.ok()) return file.status();
    for (const SnapshotChunk* chunk : {&kWhole, &kWithoutMoments}) {
      if (const absl::Status added = file->Add(*chunk); !added.ok()) return added;
    }
    return file->Commit();
  }
  std::string Bytes() const {
    std::ostringstream bytes;
    bytes << std::ifstream(path_, std::ios::binary).rdbuf();
    return bytes.str();
  }
  void Replace(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(SnapshotFileTest, WhatIsReadIsWhatWasWritten) {
  ASSERT_TRUE(Write().ok());
  const auto header = ReadSnapshotHeader(path_);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(*header, kHeader);
  const auto snapshot = ReadSnapshot(path_);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->header, kHeader);
  EXPECT_THAT(snapshot->chunks, ::testing::ElementsAre(kWhole, kWithoutMoments));
}

TEST_F(SnapshotFileTest, FileThatIsNotCommittedIsInNobodysPlaceAndLeavesNothing) {
  {
    auto file = SnapshotFile::Create(path_, kHeader);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->Add(kWhole).ok());
    EXPECT_FALSE(std::filesystem::exists(path_));
    EXPECT_TRUE(absl::IsNotFound(ReadSnapshot(path_).status()));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(SnapshotFileTest, FileThatIsCutOffAnywhereIsRefusedByName) {
  ASSERT_TRUE(Write().ok());
  const std::string whole = Bytes();
  for (size_t size = 0; size < whole.size(); ++size) {
    Replace(whole.substr(0, size));
    const absl::Status status = ReadSnapshot(path_).status();
    ASSERT_FALSE(status.ok()) << size;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_)) << size;
  }
}

TEST_F(SnapshotFileTest, FileWithAnyByteChangedIsRefusedByName) {
  ASSERT_TRUE(Write().ok());
  const std::string whole = Bytes();
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    Replace(damaged);
    const absl::Status status = ReadSnapshot(path_).status();
    ASSERT_FALSE(status.ok()) << at;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_)) << at;
  }
  Replace(whole + "x");
  EXPECT_THAT(std::string(ReadSnapshot(path_).status().message()),
              HasSubstr("is damaged: it has bytes after its last record"));
}

TEST_F(SnapshotFileTest, ForeignFilesAndThoseOfLaterReleasesAreToldApart) {
  Replace("anything else");
  EXPECT_EQ(ReadSnapshotHeader(path_).status(),
            absl::FailedPreconditionError(path_ + " is not a snapshot of Thalweg's"));
  ASSERT_TRUE(Write().ok());
  std::string later = Bytes();
  later[8] = 2;
  Replace(later);
  EXPECT_EQ(ReadSnapshotHeader(path_).status(),
            absl::FailedPreconditionError(path_ + " is a snapshot of version 2, expected 1"));
}

TEST_F(SnapshotFileTest, FullDiskIsSaidToBeFull) {
  // Everything written to this device finds it full.
  std::filesystem::create_symlink("/dev/full", path_ + kUnfinished);
  const absl::Status status = Write();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("No space left on device"));
  EXPECT_FALSE(std::filesystem::exists(path_));
}

}  // namespace
}  // namespace thalweg::snapshot_file_test
