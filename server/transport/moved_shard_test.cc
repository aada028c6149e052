// This test moves the name of a shard to another address, as a cluster does with an aggregator that
// it starts again somewhere else.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/thread.h"
#include "server/net/address.h"
#include "server/transport/guard/acceptor.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg::moved_shard_test {
namespace {

// gRPC asks once in 30 s by default, and a node's grace is 10 s.
constexpr Duration kGrace = std::chrono::seconds(10);

// A NameServer answers every question for an IPv4 address with the same one, over UDP.
class NameServer {
 public:
  NameServer() : socket_(::socket(AF_INET, SOCK_DGRAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(socket_.fd(), any, size), 0);
    EXPECT_EQ(getsockname(socket_.fd(), any, &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = Thread("names", [this] { Answer(); });
  }
  ~NameServer() { stopped_ = true; }

  int port() const { return port_; }
  void MoveTo(const char* address) { address_ = inet_addr(address); }

 private:
  void Answer() {
    while (!stopped_) {
      pollfd wait{socket_.fd(), POLLIN, 0};
      if (poll(&wait, 1, 20) <= 0) continue;
      std::vector<uint8_t> message(512);
      sockaddr_in peer{};
      socklen_t size = sizeof peer;
      auto* from = reinterpret_cast<sockaddr*>(&peer);
      const ssize_t length = recvfrom(socket_.fd(), message.data(), message.size(), 0, from, &size);
      if (length < 17) continue;
      size_t end = 12;  // of the header; then the name in pieces, type and class
      while (end + 5 < static_cast<size_t>(length) && message[end] != 0) end += message[end] + 1u;
      const bool is_ipv4 = message[end + 2] == 1;
      message.resize(end + 5);
      message[2] = 0x81;  // a response
      message[3] = 0x80;
      message[7] = is_ipv4 ? 1 : 0;                             // answers
      message[8] = message[9] = message[10] = message[11] = 0;  // nothing else
      if (is_ipv4) {
        const uint32_t address = address_;
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&address);
        const uint8_t answer[] = {0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4};  // the name's; no time
        message.insert(message.end(), std::begin(answer), std::end(answer));
        message.insert(message.end(), bytes, bytes + 4);
      }
      sendto(socket_.fd(), message.data(), message.size(), 0, from, size);
    }
  }

  const Socket socket_;
  int port_ = 0;
  std::atomic<uint32_t> address_{0};
  std::atomic<bool> stopped_{false};
  Thread thread_;
};

TEST(MovedShardTest, NodeFindsAShardThatComesBackAtAnotherAddressWithinItsGrace) {
  MetricRegistry metrics;
  RecordingShard shard;
  NameServer names;
  auto before = ShardServer::Start({.listen = "127.0.0.1:0"}, shard, metrics);
  ASSERT_TRUE(before.ok()) << before.status();
  const int port = ParseHostPort((*before)->address())->port;
  names.MoveTo("127.0.0.1");
  const auto remote =
      RemoteShard::Create(absl::StrCat("dns://127.0.0.1:", names.port(), "/shard.example:", port),
                          {.grace = kGrace}, metrics);
  ASSERT_TRUE(remote->MeasureLink(1, Now() + kTestPatience, {}).ok());

  before->reset();
  auto after = ShardServer::Start({.listen = absl::StrCat("127.0.0.2:", port)}, shard, metrics);
  ASSERT_TRUE(after.ok()) << after.status();
  names.MoveTo("127.0.0.2");
  const auto found = remote->MeasureLink(2, Now() + kGrace, {});
  EXPECT_TRUE(found.ok()) << found.status();
}

}  // namespace
}  // namespace thalweg::moved_shard_test
