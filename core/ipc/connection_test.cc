#include "core/ipc/connection.h"

#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/thread.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/random_message.h"

namespace thalweg::connection_test {
namespace {

using ::testing::HasSubstr;

TimePoint Soon() { return Now() + std::chrono::seconds(60); }

struct Sockets {
  UniqueFd a;
  UniqueFd b;
};
Sockets MakeSockets() {
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

struct Pair {
  std::unique_ptr<Connection> a;
  std::unique_ptr<Connection> b;
};
Pair MakePair() {
  Sockets sockets = MakeSockets();
  return {std::make_unique<Connection>(std::move(sockets.a)),
          std::make_unique<Connection>(std::move(sockets.b))};
}

// The peer of this fixture's Connection is a bare socket, which can break the rules.
class RawPeerTest : public ::testing::Test {
 protected:
  RawPeerTest() : sockets_(MakeSockets()), connection_(std::move(sockets_.a)) {}

  void Write(const std::string& bytes, int num_fds = 0) {
    iovec piece = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
    msghdr header = {};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    if (num_fds > 0) {
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
      for (int i = 0; i < num_fds; ++i) reinterpret_cast<int*>(CMSG_DATA(rights))[i] = 0;
    }
    ASSERT_EQ(sendmsg(sockets_.b.get(), &header, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  absl::Status ReceiveError() { return connection_.Receive(Now()).status(); }

  Sockets sockets_;
  Connection connection_;
};

int OpenDescriptors() {
  DIR* folder = opendir("/proc/self/fd");
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

int WaitForChild(pid_t child) {
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ConnectionTest, EveryMessageArrivesInOrderInBothDirections) {
  Pair pair = MakePair();
  ipc::RandomMessages random(1);
  std::vector<ipc::Message> sent;
  for (int i = 0; i < 50; ++i) {
    sent.push_back(random.Any());
    ASSERT_TRUE(pair.a->Send(sent.back()).ok());
    ASSERT_TRUE(pair.b->Send(sent.back()).ok());
  }
  for (const ipc::Message& message : sent) {
    for (Connection* end : {pair.a.get(), pair.b.get()}) {
      auto received = end->Receive(Soon());
      ASSERT_TRUE(received.ok()) << received.status();
      EXPECT_EQ(received->message, message);
      EXPECT_FALSE(received->fd.valid());
    }
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(pair.a->Receive(Now()).status()));
}

// Worker and sidecar run in two processes: the parent's gradients reach the child only through the
// arena.
TEST(ConnectionTest, ArenaCrossesToAnotherProcess) {
  constexpr uint64_t kBytes = 100'000;
  Pair pair = MakePair();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    pair.a->CloseInChild();
    auto received = pair.b->Receive(Soon());
    if (!received.ok()) _exit(1);
    auto arena = BucketArena::Open(std::move(received->fd), kBytes);
    if (!arena.ok()) _exit(2);
    if (arena->WaitReady(1, Soon()) != 1) _exit(3);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < kBytes; ++i) {
      sum += std::to_integer<uint64_t>(std::as_const(*arena).payload()[i]);
    }
    _exit(pair.b->Send(ipc::Submit{{0, 0}, sum}).ok() ? 0 : 4);
  }
  auto arena = BucketArena::Create("test", kBytes, true);
  ASSERT_TRUE(arena.ok());
  ASSERT_TRUE(pair.a->Send(ipc::RegisterBucket{}, arena->fd()).ok());
  uint64_t sum = 0;
  for (uint64_t i = 0; i < kBytes; ++i) {
    arena->payload()[i] = static_cast<std::byte>(i % 251);
    sum += i % 251;
  }
  arena->PublishReady(1);
  auto answer = pair.a->Receive(Soon());
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->message, ipc::Message(ipc::Submit{{0, 0}, sum}));
  EXPECT_EQ(WaitForChild(child), 0);
}

TEST(ConnectionTest, ChildThatClosesLeavesTheParentsConnectionAlive) {
  Pair pair = MakePair();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    pair.a->CloseInChild();
    const bool refused = absl::IsUnavailable(pair.a->Send(ipc::Leave{}));
    pair.a.reset();
    pair.b->CloseInChild();
    _exit(refused ? 0 : 1);
  }
  EXPECT_EQ(WaitForChild(child), 0);
  ASSERT_TRUE(pair.a->Send(ipc::Leave{}).ok());
  EXPECT_TRUE(pair.b->Receive(Soon()).ok());
}

TEST(ConnectionTest, EndIsSeenAlthoughAForkedChildHoldsACopy) {
  Pair pair = MakePair();
  Sockets keep = MakeSockets();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    keep.b.reset();
    char byte = 0;
    _exit(static_cast<int>(read(keep.a.get(), &byte, 1)));  // until the parent closes
  }
  pair.a.reset();
  EXPECT_TRUE(absl::IsUnavailable(pair.b->Receive(Soon()).status()));
  keep.a.reset();
  keep.b.reset();
  EXPECT_EQ(WaitForChild(child), 0);
}

TEST(ConnectionTest, BigFrameWithDescriptorArrivesWhole) {
  ipc::RegisterBucket big;
  for (int i = 0; i < 20'000; ++i) {
    big.layout.tensors.push_back({absl::StrCat("layer.", i, std::string(100, 'x')), {i, 3}});
  }
  Pair pair = MakePair();
  auto arena = BucketArena::Create("test", 77, true);
  ASSERT_TRUE(arena.ok());
  Thread sender("sender", [&] { EXPECT_TRUE(pair.a->Send(big, arena->fd()).ok()); });
  auto received = pair.b->Receive(Soon());
  sender.Join();
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(received->message, ipc::Message(big));
  EXPECT_EQ(fcntl(received->fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_TRUE(BucketArena::Open(std::move(received->fd), 77).ok());
}

TEST(ConnectionTest, ConcurrentWritersInterleaveWholeFrames) {
  constexpr uint32_t kWriters = 4;
  constexpr uint64_t kFrames = 200;
  Pair pair = MakePair();
  std::vector<Thread> writers;
  for (uint32_t w = 0; w < kWriters; ++w) {
    writers.emplace_back("writer", [&, w] {
      for (uint64_t i = 0; i < kFrames; ++i) {
        // Some messages exceed the socket's buffer, so that a frame takes several writes.
        const size_t size = i % 20 == 0 ? 400'000 : i;
        const ipc::Welcome message{i, w, std::string(size, static_cast<char>('a' + w)), 0};
        EXPECT_TRUE(pair.a->Send(message).ok());
      }
    });
  }
  std::map<uint32_t, uint64_t> next;
  for (uint64_t i = 0; i < kWriters * kFrames; ++i) {
    auto received = pair.b->Receive(Soon());
    ASSERT_TRUE(received.ok()) << received.status();
    const auto& message = std::get<ipc::Welcome>(received->message);
    EXPECT_EQ(message.epoch, next[message.num_shards]++);
    const size_t size = message.epoch % 20 == 0 ? 400'000 : message.epoch;
    EXPECT_EQ(message.server_version,
              std::string(size, static_cast<char>('a' + message.num_shards)));
  }
}

TEST(ConnectionTest, PeerThatDoesNotReadIsGivenUp) {
  Sockets sockets = MakeSockets();
  Connection connection(std::move(sockets.a), std::chrono::milliseconds(20));
  absl::Status sent;
  for (int i = 0; i < 1000 && sent.ok(); ++i) {
    sent = connection.Send(ipc::Fail{absl::StatusCode::kAborted, std::string(100'000, 'x')});
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(sent)) << sent;
  EXPECT_TRUE(absl::IsUnavailable(connection.Send(ipc::Leave{})));
}

TEST(ConnectionTest, MessageTooLongIsRefusedAndTheConnectionLivesOn) {
  Pair pair = MakePair();
  const ipc::Fail big{absl::StatusCode::kAborted, std::string(ipc::kMaxFrameBytes, 'x')};
  EXPECT_TRUE(absl::IsInvalidArgument(pair.a->Send(big)));
  ASSERT_TRUE(pair.a->Send(ipc::Leave{}).ok());
  EXPECT_TRUE(pair.b->Receive(Soon()).ok());
}

TEST(ConnectionTest, ShutdownWakesTheReader) {
  Pair pair = MakePair();
  absl::Status result;
  Thread reader("reader", [&] { result = pair.a->Receive(Soon()).status(); });
  pair.a->Shutdown();
  pair.a->Shutdown();
  reader.Join();
  EXPECT_TRUE(absl::IsUnavailable(result)) << result;
  EXPECT_TRUE(absl::IsUnavailable(pair.a->Send(ipc::Leave{})));
  EXPECT_TRUE(absl::IsUnavailable(pair.b->Receive(Soon()).status()));
  EXPECT_TRUE(absl::IsUnavailable(pair.b->Send(ipc::Leave{})));
}

TEST(ConnectionTest, WhatWasSentBeforeClosingIsStillRead) {
  Pair pair = MakePair();
  const ipc::Message last = ipc::Fail{absl::StatusCode::kDeadlineExceeded, "node 3 was missing"};
  ASSERT_TRUE(pair.b->Send(ipc::Leave{}).ok());  // a never reads it, so the close becomes a reset
  ASSERT_TRUE(pair.a->Send(last).ok());
  pair.a.reset();
  auto received = pair.b->Receive(Soon());
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(received->message, last);
  const absl::Status end = pair.b->Receive(Soon()).status();
  EXPECT_TRUE(absl::IsUnavailable(end));
  EXPECT_THAT(std::string(end.message()), HasSubstr("closed"));
}

TEST(ConnectionTest, WhatThePeerSaidBeforeClosingIsReadAlsoAfterASendHasFailed) {
  Pair pair = MakePair();
  ASSERT_TRUE(pair.a->Send(ipc::Fail{absl::StatusCode::kInternal, "why"}).ok());
  pair.a.reset();
  EXPECT_TRUE(absl::IsUnavailable(pair.b->Send(ipc::Leave{})));
  const auto received = pair.b->Receive(Soon());
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(std::get<ipc::Fail>(received->message).message, "why");
  EXPECT_TRUE(absl::IsUnavailable(pair.b->Receive(Soon()).status()));
}

TEST(ConnectionTest, PeerCredentialsAreOurs) {
  Pair pair = MakePair();
  auto peer = pair.a->Peer();
  ASSERT_TRUE(peer.ok());
  EXPECT_EQ(peer->pid, getpid());
  EXPECT_EQ(peer->uid, getuid());
  EXPECT_EQ(peer->gid, getgid());
}

TEST_F(RawPeerTest, FrameThatComesByteByByteIsKept) {
  const ipc::Message message = ipc::Welcome{7, 2, "version", 65536};
  for (int round = 0; round < 2; ++round) {
    const std::string frame = ipc::EncodeFrame(message, true);
    for (size_t i = 0; i + 1 < frame.size(); ++i) {
      Write(frame.substr(i, 1), i == 0 ? 1 : 0);
      ASSERT_TRUE(absl::IsDeadlineExceeded(ReceiveError())) << i;
    }
    Write(frame.substr(frame.size() - 1));
    auto received = connection_.Receive(Now());
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_EQ(received->message, message);
    EXPECT_TRUE(received->fd.valid());
  }
}

TEST_F(RawPeerTest, EndWithinAFrameIsNamed) {
  Write(ipc::EncodeFrame(ipc::Welcome{}, false).substr(0, 15));
  sockets_.b.reset();
  const absl::Status end = ReceiveError();
  EXPECT_TRUE(absl::IsUnavailable(end));
  EXPECT_THAT(std::string(end.message()), HasSubstr("middle of a frame"));
}

TEST_F(RawPeerTest, LengthBeyondTheLimitIsRefusedFromTheHeaderAlone) {
  std::string header = ipc::EncodeFrame(ipc::Leave{}, false);
  header.replace(8, 4, "\xff\xff\xff\xff");
  Write(header);
  EXPECT_TRUE(absl::IsInvalidArgument(ReceiveError()));
  Write(ipc::EncodeFrame(ipc::Leave{}, false));
  EXPECT_TRUE(absl::IsInvalidArgument(ReceiveError())) << "a broken stream must stay broken";
}

TEST_F(RawPeerTest, AnnouncedDescriptorMustCome) {
  Write(ipc::EncodeFrame(ipc::BucketReady{}, true));
  EXPECT_THAT(std::string(ReceiveError().message()), HasSubstr("none came"));
}

TEST_F(RawPeerTest, UnexpectedDescriptorIsRefusedAndClosed) {
  const int before = OpenDescriptors();
  Write(ipc::EncodeFrame(ipc::BucketReady{}, false), 1);
  EXPECT_THAT(std::string(ReceiveError().message()), HasSubstr("announces none"));
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(RawPeerTest, ExtraDescriptorsAreRefusedAndClosed) {
  for (const int count : {2, 3, 8}) {
    Sockets sockets = MakeSockets();
    Connection connection(std::move(sockets.a));
    std::swap(sockets_.b, sockets.b);
    const int before = OpenDescriptors();
    Write(ipc::EncodeFrame(ipc::BucketReady{}, true), count);
    EXPECT_THAT(std::string(connection.Receive(Now()).status().message()),
                HasSubstr("more than one descriptor"));
    EXPECT_EQ(OpenDescriptors(), before);
  }
}

TEST_F(RawPeerTest, SecondDescriptorLaterInTheFrameIsRefusedAndClosed) {
  const int before = OpenDescriptors();
  const std::string frame = ipc::EncodeFrame(ipc::BucketReady{}, true);
  Write(frame.substr(0, 14), 1);
  Write(frame.substr(14), 1);
  EXPECT_TRUE(absl::IsInvalidArgument(ReceiveError()));
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(RawPeerTest, MalformedBodyIsRefused) {
  std::string frame = ipc::EncodeFrame(ipc::Fail{absl::StatusCode::kAborted, "x"}, false);
  frame[12] = 0;  // the code: OK
  Write(frame);
  const absl::Status error = ReceiveError();
  EXPECT_TRUE(absl::IsInvalidArgument(error));
  EXPECT_THAT(std::string(error.message()), HasSubstr("Fail: status code 0"));
}

}  // namespace
}  // namespace thalweg::connection_test
