#include "server/net/connections.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "absl/strings/str_cat.h"

namespace thalweg::connections_test {
namespace {

// Two ends of a connection of TCP on 127.0.0.1.
class ConnectionsTest : public ::testing::Test {
 protected:
  ConnectionsTest() {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(listener, any, size), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, any, &size), 0);
    port_ = ntohs(address.sin_port);
    client_ = ::socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(connect(client_, any, size), 0);
    server_ = accept(listener, nullptr, nullptr);
    EXPECT_GE(server_, 0);
    close(listener);
  }
  ~ConnectionsTest() override {
    close(client_);
    close(server_);
  }

  int port_ = 0;
  int client_ = -1;
  int server_ = -1;
};

TEST_F(ConnectionsTest, OwnPortIsToldAndOtherDescriptorsHaveNone) {
  EXPECT_EQ(LocalPort(server_), port_);
  EXPECT_NE(LocalPort(client_), port_);
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  EXPECT_EQ(LocalPort(pipe_ends[0]), 0);
  EXPECT_EQ(CookieOf(pipe_ends[0]), 0u);
  for (const int end : pipe_ends) close(end);
}

TEST_F(ConnectionsTest, BytesCountOnceTheyHaveBeenRead) {
  const std::array<char, 100> bytes{};
  ASSERT_EQ(send(client_, bytes.data(), bytes.size(), 0), 100);
  std::array<char, 60> some{};
  ASSERT_EQ(recv(server_, some.data(), some.size(), MSG_WAITALL), 60);
  EXPECT_EQ(BytesRead(server_), 60u);
  EXPECT_EQ(BytesRead(client_), 0u);
  EXPECT_FALSE(BytesRead(-1));
}

TEST_F(ConnectionsTest, PeerIsTheOtherEnd) {
  EXPECT_EQ(PeerOf(client_), absl::StrCat("127.0.0.1:", port_));
  EXPECT_EQ(PeerOf(server_), absl::StrCat("127.0.0.1:", LocalPort(client_)));
  EXPECT_EQ(PeerOf(-1), "");
}

TEST_F(ConnectionsTest, ConnectionEndsAndItsDescriptorStaysOpen) {
  char byte = 'x';
  ASSERT_EQ(send(client_, &byte, 1, 0), 1);
  EXPECT_TRUE(EndConnection(server_, CookieOf(server_)));
  EXPECT_EQ(recv(client_, &byte, 1, 0), 0);
  EXPECT_EQ(LocalPort(server_), port_);
}

TEST_F(ConnectionsTest, ConnectionThatHasGotTheDescriptorOfAnotherIsLeftAlone) {
  const uint64_t before = CookieOf(server_);
  const int other = dup(client_);
  ASSERT_EQ(dup2(other, server_), server_);  // closes the connection, and gives away its number
  EXPECT_NE(CookieOf(server_), before);
  EXPECT_FALSE(EndConnection(server_, before));
  close(other);
}

}  // namespace
}  // namespace thalweg::connections_test
