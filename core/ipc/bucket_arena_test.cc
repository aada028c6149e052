#include "core/ipc/bucket_arena.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/base/protocol.h"
#include "core/base/thread.h"

namespace thalweg::bucket_arena_test {
namespace {

using ::testing::HasSubstr;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

TimePoint Soon() { return Now() + std::chrono::seconds(60); }

UniqueFd Duplicate(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

BucketArena MustCreate(uint64_t payload_bytes, bool peers_read_only = true) {
  auto arena = BucketArena::Create("thalweg-test", payload_bytes, peers_read_only);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

absl::Status OpenError(UniqueFd fd, uint64_t payload_bytes) {
  return BucketArena::Open(std::move(fd), payload_bytes).status();
}

// Returns a memfd with the given header fields, as a peer that breaks the rules could make it.
UniqueFd Forge(const std::string& magic, uint32_t version, uint64_t payload_bytes, off_t file_bytes,
               int seals) {
  UniqueFd fd(memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), file_bytes), 0);
  EXPECT_EQ(pwrite(fd.get(), magic.data(), 8, 0), 8);
  EXPECT_EQ(pwrite(fd.get(), &version, 4, 8), 4);
  EXPECT_EQ(pwrite(fd.get(), &payload_bytes, 8, 16), 8);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(BucketArenaTest, ReaderSeesWhatTheWriterWrote) {
  for (const uint64_t bytes : {0u, 1u, 4095u, 4096u, 4097u, 1u << 20}) {
    BucketArena writer = MustCreate(bytes);
    EXPECT_EQ(writer.payload_bytes(), bytes);
    auto reader = BucketArena::Open(Duplicate(writer.fd()), bytes);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->payload_bytes(), bytes);
    const BucketArena& view = *reader;
    for (uint64_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(view.payload()[i], std::byte{0});
      writer.payload()[i] = static_cast<std::byte>(i * 7 + 1);
    }
    EXPECT_EQ(std::memcmp(view.payload(), writer.payload(), bytes), 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.payload()) % 4096, 0u);
  }
}

TEST(BucketArenaTest, HeaderIsTheDocumentedBytes) {
  BucketArena arena = MustCreate(5000);
  arena.PublishReady(0x0102);
  unsigned char page[4096];
  ASSERT_EQ(pread(arena.fd(), page, sizeof page, 0), 4096);
  unsigned char expected[4096] = {'T', 'H', 'W', 'G', 'A', 'R', 'E', 'N', kIpcVersion};
  expected[16] = 0x88;  // 5000
  expected[17] = 0x13;
  expected[64] = 0x02;
  expected[65] = 0x01;
  EXPECT_EQ(std::memcmp(page, expected, sizeof page), 0);
  struct stat info = {};
  ASSERT_EQ(fstat(arena.fd(), &info), 0);
  EXPECT_EQ(info.st_size, 3 * 4096);
}

TEST(BucketArenaTest, SealsRefuseEveryChangeOfSize) {
  BucketArena arena = MustCreate(10'000, false);
  EXPECT_EQ(fcntl(arena.fd(), F_GET_SEALS), kSeals);
  EXPECT_NE(ftruncate(arena.fd(), 0), 0);
  EXPECT_NE(ftruncate(arena.fd(), 1 << 20), 0);
  EXPECT_NE(fcntl(arena.fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_EQ(fcntl(arena.fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(BucketArenaTest, ReadOnlyForPeersRefusesWritableMappings) {
  BucketArena sealed = MustCreate(100, true);
  EXPECT_EQ(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, sealed.fd(), 0), MAP_FAILED);
  EXPECT_LT(pwrite(sealed.fd(), "x", 1, 4096), 0);
  sealed.payload()[0] = std::byte{1};  // the writer's own mapping is still writable

  BucketArena open = MustCreate(100, false);
  void* base = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, open.fd(), 0);
  ASSERT_NE(base, MAP_FAILED);
  munmap(base, 8192);
}

TEST(BucketArenaTest, OpenedArenaIsMappedReadOnly) {
  BucketArena writer = MustCreate(100, false);
  auto reader = BucketArena::Open(Duplicate(writer.fd()), 100);
  ASSERT_TRUE(reader.ok());
  EXPECT_DEATH(*const_cast<volatile std::byte*>(reader->payload()) = std::byte{1}, "");
}

TEST(BucketArenaTest, UnsealedMemfdIsRefused) {
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_GROW}) {
    EXPECT_THAT(
        std::string(OpenError(Forge("THWGAREN", kIpcVersion, 10, 8192, seals), 10).message()),
        HasSubstr("its owner could cut it"));
  }
  EXPECT_TRUE(OpenError(Forge("THWGAREN", kIpcVersion, 10, 8192, kSeals), 10).ok());
}

TEST(BucketArenaTest, WrongSizeIsRefused) {
  for (const off_t size : {0, 10, 4096, 8191, 8193, 12288}) {
    UniqueFd fd(memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(ftruncate(fd.get(), size), 0);
    ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, kSeals), 0);
    EXPECT_THAT(std::string(OpenError(std::move(fd), 10).message()), HasSubstr("8192 expected"));
  }
}

TEST(BucketArenaTest, WrongHeaderIsRefused) {
  EXPECT_THAT(std::string(OpenError(Forge("THWGARENA", 99, 10, 8192, kSeals), 10).message()),
              HasSubstr("ipc version 99"));
  EXPECT_THAT(
      std::string(OpenError(Forge("thwgaren", kIpcVersion, 10, 8192, kSeals), 10).message()),
      HasSubstr("magic"));
  EXPECT_THAT(
      std::string(OpenError(Forge("THWGAREN", kIpcVersion, 11, 8192, kSeals), 10).message()),
      HasSubstr("header says 11"));
}

TEST(BucketArenaTest, OtherDescriptorsAreRefused) {
  int pipe_fds[2];
  ASSERT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
  UniqueFd write_end(pipe_fds[1]);
  EXPECT_TRUE(absl::IsInvalidArgument(OpenError(UniqueFd(pipe_fds[0]), 10)));
  EXPECT_TRUE(absl::IsInvalidArgument(OpenError(UniqueFd(open("/proc/self/exe", O_RDONLY)), 10)));
  EXPECT_TRUE(absl::IsInvalidArgument(OpenError(UniqueFd(), 10)));
}

TEST(BucketArenaTest, AbsurdSizesAreRefusedBeforeAllocating) {
  for (const uint64_t bytes : {kMaxArenaPayloadBytes + 1, UINT64_MAX}) {
    EXPECT_TRUE(absl::IsInvalidArgument(BucketArena::Create("big", bytes, true).status()));
    EXPECT_TRUE(
        absl::IsInvalidArgument(OpenError(Forge("THWGAREN", kIpcVersion, 0, 4096, kSeals), bytes)));
  }
}

TEST(BucketArenaTest, MovedArenaKeepsItsMappingAndClosesOnce) {
  BucketArena first = MustCreate(100);
  first.payload()[3] = std::byte{9};
  BucketArena second = std::move(first);
  EXPECT_EQ(second.payload()[3], std::byte{9});
  const int old_fd = second.fd();
  second = MustCreate(200);
  EXPECT_EQ(second.payload_bytes(), 200u);
  EXPECT_EQ(second.payload()[199], std::byte{0});
  EXPECT_NE(second.fd(), old_fd);
  EXPECT_LT(fcntl(old_fd, F_GETFD), 0);
}

TEST(BucketArenaTest, WaitReadyGivesUpAtTheDeadline) {
  BucketArena writer = MustCreate(100);
  auto reader = BucketArena::Open(Duplicate(writer.fd()), 100);
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(reader->WaitReady(1, Now() - std::chrono::seconds(1)), 0u);
  writer.PublishReady(3);
  const TimePoint deadline = Now() + std::chrono::milliseconds(30);
  EXPECT_EQ(reader->WaitReady(4, deadline), 3u);
  EXPECT_GE(Now(), deadline);
  EXPECT_EQ(reader->WaitReady(2, Now()), 3u);
  writer.ResetReady();
  EXPECT_EQ(reader->WaitReady(0, Now()), 0u);
}

// In each round the writer fills one chunk after the other while two readers follow; a chunk that
// is counted ready before its bytes are there shows as a wrong sum. The acknowledgement uses a
// second arena.
TEST(BucketArenaTest, PayloadIsThereWhenTheCountSaysSo) {
  constexpr uint32_t kChunks = 64;
  constexpr size_t kChunkWords = 512;
  constexpr uint32_t kRounds = 100;
  constexpr uint64_t kBytes = kChunks * kChunkWords * sizeof(uint32_t);
  BucketArena writer = MustCreate(kBytes);
  std::vector<BucketArena> acks;
  for (int i = 0; i < 2; ++i) acks.push_back(MustCreate(0));
  std::vector<int> bad(2, 0);
  std::vector<Thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back("reader", [&, r] {
      auto arena = BucketArena::Open(Duplicate(writer.fd()), kBytes);
      ASSERT_TRUE(arena.ok());
      const auto* words = reinterpret_cast<const uint32_t*>(std::as_const(*arena).payload());
      for (uint32_t round = 0; round < kRounds; ++round) {
        for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
          const uint32_t wanted = round * kChunks + chunk + 1;
          if (arena->WaitReady(wanted, Soon()) < wanted) ++bad[r];
          for (size_t i = 0; i < kChunkWords; ++i) {
            if (words[chunk * kChunkWords + i] != wanted) ++bad[r];
          }
        }
        acks[r].PublishReady(round + 1);
      }
    });
  }
  auto* words = reinterpret_cast<uint32_t*>(writer.payload());
  for (uint32_t round = 0; round < kRounds; ++round) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t count = round * kChunks + chunk + 1;
      for (size_t i = 0; i < kChunkWords; ++i) words[chunk * kChunkWords + i] = count;
      writer.PublishReady(count);
    }
    for (const BucketArena& ack : acks) ASSERT_EQ(ack.WaitReady(round + 1, Soon()), round + 1);
  }
  readers.clear();
  EXPECT_EQ(bad, std::vector<int>({0, 0}));
}

}  // namespace
}  // namespace thalweg::bucket_arena_test
