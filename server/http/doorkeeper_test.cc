// These tests keep an HTTP port busy with connections that say little or nothing, and probe it.
#include "server/http/doorkeeper.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "httplib.h"
#include "server/http/http_server.h"
#include "server/net/address.h"
#include "server/net/connections.h"

namespace thalweg::doorkeeper_test {
namespace {

// A Guest is a connection that begins a request, and never ends it.
class Guest {
 public:
  Guest(int port, std::string_view begin) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    Say(begin);
  }
  ~Guest() { close(fd_); }
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;

  // Returns false when the server has ended the connection.
  bool Say(std::string_view text) {
    return send(fd_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }
  // Waits until the server ends the connection.
  bool IsEnded() {
    const timeval patience{60, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    char byte;
    return recv(fd_, &byte, 1, 0) <= 0 && errno != EAGAIN;
  }

 private:
  const int fd_;
};

class DoorkeeperTest : public ::testing::Test {
 protected:
  DoorkeeperTest() {
    auto server =
        HttpServer::Start({.listen = "127.0.0.1:0"}, metrics_, [] { return absl::OkStatus(); });
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    port_ = ParseHostPort(server_->address())->port;
  }

  void ExpectProbeAnswered() {
    httplib::Client client("http://" + server_->address());
    client.set_connection_timeout(kProbe);
    client.set_read_timeout(kProbe);
    const auto answer = client.Get("/healthz");
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->status, 200);
  }
  double Ended() { return metrics_.GetCounter("thalweg_http_ended_connections_total", "").Value(); }

  // Far shorter than the library would be busy with idle connections: it waits 5 s for a byte.
  static constexpr std::chrono::seconds kProbe{20};

  MetricRegistry metrics_;
  std::unique_ptr<HttpServer> server_;
  int port_ = 0;
};

TEST_F(DoorkeeperTest, ProbesAreAnsweredBesideSlowAndIdleConnections) {
  std::vector<std::unique_ptr<Guest>> slow, idle;
  for (int i = 0; i < 200; ++i) idle.push_back(std::make_unique<Guest>(port_, ""));
  for (int i = 0; i < 8; ++i)
    slow.push_back(std::make_unique<Guest>(port_, "GET / HTTP/1.1\r\nX: "));
  for (int probe = 0; probe < 6; ++probe) {
    ExpectProbeAnswered();
    for (auto& guest : slow) {
      if (!guest->Say("x")) guest = std::make_unique<Guest>(port_, "GET / HTTP/1.1\r\nX: ");
    }
    for (int i = 0; i < 20; ++i) idle[i] = std::make_unique<Guest>(port_, "");
  }
  EXPECT_GT(Ended(), 0);
}

TEST_F(DoorkeeperTest, RequestThatTakesTooLongIsEndedAlsoIfItIsNeverSilent) {
  Guest guest(port_, "GET / HTTP/1.1\r\nX: ");
  const TimePoint deadline = Now() + 6 * Doorkeeper::Options().patience;
  bool is_ended = false;
  while (!is_ended && Now() < deadline) {
    for (int i = 0; i < 16; ++i) ExpectProbeAnswered();  // a line may have 8 KiB
    is_ended = !guest.Say("x");
  }
  EXPECT_TRUE(is_ended);  // of a guest that falls silent the library would get tired
}

// A Room is a port with a doorkeeper and one guest, which nobody answers.
class Room {
 public:
  explicit Room(Doorkeeper::Options options) {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(listen(listener, 1), 0);  // at any port
    options.port = LocalPort(listener);
    guest_.emplace(options.port, "");
    inside_ = accept(listener, nullptr, nullptr);
    EXPECT_GE(inside_, 0);
    close(listener);
    door_.emplace(options, ended_);
    door_->Opened();
  }
  ~Room() { close(inside_); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  // Reads what the guest says. Returns whether the guest could say it.
  bool Hear(std::string_view text) {
    std::string heard(text.size(), ' ');
    return guest_->Say(text) && recv(inside_, heard.data(), heard.size(), MSG_WAITALL) > 0;
  }
  bool IsEnded() { return guest_->IsEnded(); }
  // Returns how many connections have been ended. The doorkeeper goes.
  double Ended() {
    door_.reset();
    return ended_.Value();
  }

 private:
  std::optional<Guest> guest_;
  int inside_ = -1;
  Counter ended_;
  std::optional<Doorkeeper> door_;
};

TEST(RoomTest, GuestThatStaysTooLongIsEndedOnceAlsoIfItIsNeverSilent) {
  Room room({.patience = std::chrono::milliseconds(200)});
  while (room.Hear("x")) {
  }
  EXPECT_TRUE(room.IsEnded());
  EXPECT_EQ(room.Ended(), 1);
}

TEST(RoomTest, GuestThatSaysTooMuchIsEndedOnceBeforeItsTimeIsUp) {
  constexpr size_t kMost = 10'000;
  Room room({.patience = std::chrono::hours(1), .most_bytes = kMost});
  ASSERT_TRUE(room.Hear(std::string(kMost, 'x')));
  ASSERT_TRUE(room.Hear("x"));
  EXPECT_TRUE(room.IsEnded());
  EXPECT_EQ(room.Ended(), 1);
}

}  // namespace
}  // namespace thalweg::doorkeeper_test
