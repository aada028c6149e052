#include "server/transport/guard/read_guard.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <vector>

#include "core/base/thread.h"
#include "grpcpp/alarm.h"
#include "server/transport/guard/acceptor.h"

namespace thalweg::read_guard_test {
namespace {

constexpr Duration kBusyTime = ReadGuard::Options().busy_time;
constexpr Duration kWatchdog = std::chrono::seconds(30);

// A Listener accepts connections on 127.0.0.1.
class Listener {
 public:
  Listener() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* address = reinterpret_cast<sockaddr*>(&address_);
    socklen_t size = sizeof address_;
    EXPECT_EQ(bind(socket_.fd(), address, size), 0);
    EXPECT_EQ(listen(socket_.fd(), 8), 0);
    EXPECT_EQ(getsockname(socket_.fd(), address, &size), 0);
  }
  int port() const { return ntohs(address_.sin_port); }

 private:
  friend class Connection;

  Socket socket_;
  sockaddr_in address_{};
};

// A Connection is both of its ends.
class Connection {
 public:
  explicit Connection(Listener& listener) : client_(::socket(AF_INET, SOCK_STREAM, 0)) {
    EXPECT_EQ(connect(client_.fd(), reinterpret_cast<sockaddr*>(&listener.address_),
                      sizeof listener.address_),
              0);
    server_ = Socket(accept(listener.socket_.fd(), nullptr, nullptr));
  }
  int client() const { return client_.fd(); }
  int server() const { return server_.fd(); }
  bool IsOpen() const {
    pollfd end{.fd = client(), .events = POLLIN | POLLRDHUP, .revents = 0};
    return poll(&end, 1, 0) == 0;
  }

 private:
  Socket client_;
  Socket server_;
};

// A Sender sends to a socket for as long as the other end takes it.
class Sender {
 public:
  explicit Sender(int fd)
      : thread_("sender",
                [fd] {
                  const std::vector<char> data(1 << 16);
                  while (send(fd, data.data(), data.size(), MSG_NOSIGNAL) > 0) {
                  }
                }),
        fd_(fd) {}
  ~Sender() { shutdown(fd_, SHUT_RDWR); }

 private:
  Thread thread_;
  const int fd_;
};

// A Reading is a poller's events, each of which reads from a socket for this processor time, or
// until the socket ends.
class Reading : public Completion {
 public:
  Reading(Pollers& pollers, int fd, Duration processor_time, int events, bool is_work = false)
      : queue_(pollers.Next()),
        poller_(*pollers.all()[0]),
        fd_(fd),
        processor_time_(processor_time),
        events_(events),
        is_work_(is_work) {
    Begin();
  }

  void Happened(bool /*ok*/) override {
    std::optional<Poller::Working> working;
    if (is_work_) working.emplace();
    const Duration begin = poller_.ProcessorTime();
    std::vector<char> data(1 << 16);
    bool is_open = true;
    while (is_open && poller_.ProcessorTime() - begin < processor_time_) {
      is_open = recv(fd_, data.data(), data.size(), 0) > 0;
    }
    if (is_open && --events_ > 0) {
      Begin();
      return;
    }
    MutexLock lock(mutex_);
    has_ended_ = true;
    was_open_ = is_open;
    changed_.NotifyAll();
  }

  // Returns whether the socket was open when the last event ended.
  bool WasOpen() {
    MutexLock lock(mutex_);
    EXPECT_TRUE(
        changed_.WaitUntil(mutex_, Now() + kWatchdog,
                           [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return has_ended_; }));
    return was_open_;
  }

 private:
  void Begin() { alarm_.Set(&queue_, std::chrono::system_clock::now(), this); }

  grpc::CompletionQueue& queue_;
  Poller& poller_;
  const int fd_;
  const Duration processor_time_;
  int events_;
  const bool is_work_;
  grpc::Alarm alarm_;

  Mutex mutex_;
  CondVar changed_;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool was_open_ ABSL_GUARDED_BY(mutex_) = false;
};

// The guard looks at one poller; a connection that nobody uses, and one to another port that is
// read from without end, must stay as they are.
class ReadGuardTest : public ::testing::Test {
 protected:
  ReadGuard Guard() {
    return ReadGuard({.port = listener_.port(),
                      .max_descriptor = DefaultMaxDescriptor(),
                      .busy_time = kBusyTime},
                     pollers_, closed_);
  }

  Listener listener_;
  Listener other_listener_;
  Connection idle_{listener_};
  Connection busy_{listener_};
  Connection other_{other_listener_};
  MetricRegistry metrics_;
  Counter& closed_ = metrics_.GetCounter("closed", "");
  Pollers pollers_{1};
};

TEST_F(ReadGuardTest, AConnectionThatHoldsAPollerIsClosed) {
  Thread other_reader("reader", [this] {
    std::vector<char> data(1 << 16);
    while (recv(other_.server(), data.data(), data.size(), 0) > 0) {
    }
  });
  const Sender other_sender(other_.client());
  const Sender sender(busy_.client());
  {
    const ReadGuard guard = Guard();
    Reading reading(pollers_, busy_.server(), Duration::max(), 1);
    EXPECT_FALSE(reading.WasOpen());
  }
  // The guard counts after it has closed.
  EXPECT_EQ(closed_.Value(), 1);
  EXPECT_TRUE(idle_.IsOpen());
  EXPECT_TRUE(other_.IsOpen());
}

TEST_F(ReadGuardTest, APollerThatHandlesManyEventsLosesNoConnection) {
  const ReadGuard guard = Guard();
  const Sender sender(busy_.client());
  Reading reading(pollers_, busy_.server(), kBusyTime / 10, 60);
  EXPECT_TRUE(reading.WasOpen());
  EXPECT_EQ(closed_.Value(), 0);
}

TEST_F(ReadGuardTest, APollerThatWorksForLongLosesNoConnection) {
  const ReadGuard guard = Guard();
  const Sender sender(busy_.client());
  Reading reading(pollers_, busy_.server(), 10 * kBusyTime, 3, /*is_work=*/true);
  EXPECT_TRUE(reading.WasOpen());
  EXPECT_EQ(closed_.Value(), 0);
}

}  // namespace
}  // namespace thalweg::read_guard_test
