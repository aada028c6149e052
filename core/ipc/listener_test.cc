#include "core/ipc/listener.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "core/base/thread.h"
#include "core/ipc/unix_address.h"

namespace thalweg::listener_test {
namespace {

using ::testing::HasSubstr;

TimePoint Soon() { return Now() + std::chrono::seconds(60); }

class ListenerTest : public ::testing::Test {
 protected:
  ListenerTest() {
    std::string folder = "/tmp/thalweg-XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    path_ = folder + "/s";
  }
  ~ListenerTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<Listener> MustBind() {
    auto listener = Listener::Bind(path_);
    EXPECT_TRUE(listener.ok()) << listener.status();
    return *std::move(listener);
  }
  // Binds a bare socket to path_, without any of Listener's checks; listens unless `backlog` is
  // negative.
  UniqueFd BindBare(int backlog) {
    UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = *UnixAddress(path_);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    if (backlog >= 0) {
      EXPECT_EQ(listen(fd.get(), backlog), 0);
    }
    return fd;
  }
  bool Exists(const std::string& path) { return std::filesystem::exists(path); }

  std::string folder_;
  std::string path_;
};

int WaitForChild(pid_t child) {
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(ListenerTest, ConnectedPeersTalk) {
  auto listener = MustBind();
  auto client = Connection::Connect(path_, Soon());
  ASSERT_TRUE(client.ok()) << client.status();
  auto server = listener->Accept();
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_TRUE((*client)->Send(ipc::Submit{{1, 2}, 3}).ok());
  auto received = (*server)->Receive(Soon());
  ASSERT_TRUE(received.ok());
  EXPECT_EQ(received->message, ipc::Message(ipc::Submit{{1, 2}, 3}));
  EXPECT_EQ((*server)->Peer()->pid, getpid());
}

TEST_F(ListenerTest, FileIsPrivateWhateverTheUmask) {
  const mode_t old = umask(0);
  auto listener = MustBind();
  umask(old);
  struct stat info = {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode, S_IFSOCK | 0600u);
}

TEST_F(ListenerTest, FilesAreRemovedAndThePathIsFreeAgain) {
  MustBind().reset();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  EXPECT_NE(MustBind(), nullptr);
}

TEST_F(ListenerTest, FileOfASuccessorIsNotRemoved) {
  auto listener = MustBind();
  UniqueFd kept_inode = UniqueFd(open(path_.c_str(), O_PATH | O_CLOEXEC));
  ASSERT_EQ(unlink(path_.c_str()), 0);
  UniqueFd successor = BindBare(1);
  listener.reset();
  EXPECT_TRUE(Exists(path_));
}

TEST_F(ListenerTest, StaleSocketIsReplaced) {
  BindBare(1).reset();
  ASSERT_TRUE(Exists(path_));
  auto listener = MustBind();
  EXPECT_TRUE(Connection::Connect(path_, Soon()).ok());
}

TEST_F(ListenerTest, PathOfACrashedOwnerIsFree) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto listener = Listener::Bind(path_);
    _exit(listener.ok() ? 0 : 1);
  }
  ASSERT_EQ(WaitForChild(child), 0);
  ASSERT_TRUE(Exists(path_));
  auto listener = MustBind();
  EXPECT_TRUE(Connection::Connect(path_, Soon()).ok());
}

TEST_F(ListenerTest, ForkedChildLeavesTheParentsFiles) {
  auto listener = MustBind();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    listener.reset();
    _exit(0);
  }
  ASSERT_EQ(WaitForChild(child), 0);
  EXPECT_TRUE(Connection::Connect(path_, Soon()).ok());
}

TEST_F(ListenerTest, LiveListenerIsNotReplaced) {
  auto first = MustBind();
  EXPECT_TRUE(absl::IsAlreadyExists(Listener::Bind(path_).status()));
  EXPECT_TRUE(Connection::Connect(path_, Soon()).ok());
}

TEST_F(ListenerTest, LiveSocketOfAnotherProgramIsNotReplaced) {
  UniqueFd other = BindBare(1);
  EXPECT_TRUE(absl::IsAlreadyExists(Listener::Bind(path_).status()));
  EXPECT_TRUE(Connection::Connect(path_, Soon()).ok());
}

TEST_F(ListenerTest, OtherFileInTheWayIsKept) {
  std::ofstream(path_) << "precious";
  const absl::Status status = Listener::Bind(path_).status();
  EXPECT_TRUE(absl::IsAlreadyExists(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("no socket"));
  EXPECT_EQ(std::filesystem::file_size(path_), 8u);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".lock"));
}

TEST_F(ListenerTest, LongestPathWorksAndALongerOneIsRefused) {
  const std::string longest = folder_ + "/" + std::string(107 - folder_.size() - 1, 'x');
  ASSERT_EQ(longest.size(), 107u);
  auto listener = Listener::Bind(longest);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(Connection::Connect(longest, Soon()).ok());
  for (const std::string& bad : {longest + "x", std::string(), std::string("a\0b", 3)}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Listener::Bind(bad).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(Connection::Connect(bad, Soon()).status()));
  }
}

TEST_F(ListenerTest, MissingFolderIsNamed) {
  const absl::Status status = Listener::Bind(folder_ + "/none/s").status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("create the folder"));
}

TEST_F(ListenerTest, StopEndsAcceptNowAndLater) {
  auto listener = MustBind();
  absl::Status result;
  Thread acceptor("acceptor", [&] { result = listener->Accept().status(); });
  listener->Stop();
  acceptor.Join();
  EXPECT_TRUE(absl::IsCancelled(result)) << result;
  listener->Stop();
  EXPECT_TRUE(absl::IsCancelled(listener->Accept().status()));
}

TEST_F(ListenerTest, ConnectWithoutListenerFailsAtOnceAndSaysWhatToDo) {
  for (int stale = 0; stale < 2; ++stale) {
    const absl::Status status = Connection::Connect(path_, Soon()).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
    EXPECT_THAT(std::string(status.message()), HasSubstr("start a sidecar"));
    if (stale == 0) BindBare(1).reset();
  }
}

TEST_F(ListenerTest, ConnectToAFullQueueGivesUpAtTheDeadline) {
  UniqueFd busy = BindBare(0);
  std::vector<std::unique_ptr<Connection>> queued;
  absl::Status status;
  while (status.ok() && queued.size() < 100) {
    auto connection = Connection::Connect(path_, Now() + std::chrono::milliseconds(20));
    status = connection.status();
    if (connection.ok()) queued.push_back(*std::move(connection));
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
}

// Only root can become another user and change the file's mode for that user.
TEST_F(ListenerTest, ForeignUserIsDroppedAndTheNextPeerServed) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  auto listener = MustBind();
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (setuid(65534) != 0) _exit(1);
    auto connection = Connection::Connect(path_, Soon());
    if (!connection.ok()) _exit(2);
    _exit(absl::IsUnavailable((*connection)->Receive(Soon()).status()) ? 0 : 3);
  }
  std::unique_ptr<Connection> accepted;
  Thread acceptor("acceptor", [&] {
    auto connection = listener->Accept();
    if (connection.ok()) accepted = *std::move(connection);
  });
  EXPECT_EQ(WaitForChild(child), 0);
  auto own = Connection::Connect(path_, Soon());
  acceptor.Join();
  ASSERT_NE(accepted, nullptr);
  EXPECT_EQ(accepted->Peer()->uid, geteuid());
}

}  // namespace
}  // namespace thalweg::listener_test
