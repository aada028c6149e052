#include "server/sidecar/workers/outbox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "core/base/testing/test_patience.h"

namespace thalweg::outbox_test {
namespace {

using ::testing::HasSubstr;

// The two ends of a socket between an outbox and a worker that may not read.
class OutboxTest : public ::testing::Test {
 protected:
  void Open(Outbox::Limits limits) {
    int fds[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    constexpr int kTaken = 100'000;  // bytes; the kernel doubles it
    ASSERT_EQ(setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &kTaken, sizeof kTaken), 0);
    worker_ = std::make_unique<Connection>(UniqueFd(fds[1]));
    outbox_ = std::make_unique<Outbox>(std::make_shared<Connection>(UniqueFd(fds[0])), limits,
                                       [this](const absl::Status& why) { stuck_.set_value(why); });
  }
  static constexpr size_t kThree = 1'000'000;  // bytes: three big messages fit in, and no fourth
  // Far more than a socket takes, in frames that it takes in several pieces.
  static ipc::Message Big(uint64_t number) {
    return ipc::Welcome{number, 0, std::string(300'000, 'x'), 0};
  }
  absl::Status Stuck() {
    auto why = stuck_.get_future();
    if (why.wait_for(kTestPatience) != std::future_status::ready) return absl::OkStatus();
    return why.get();
  }

  std::promise<absl::Status> stuck_;
  std::unique_ptr<Connection> worker_;
  std::unique_ptr<Outbox> outbox_;
};

TEST_F(OutboxTest, MessagesToAWorkerThatReadsLateArriveInOrderWithTheirDescriptors) {
  Open({.bytes = 100 * kThree, .patience = kTestPatience});
  constexpr uint64_t kMessages = 50;
  for (uint64_t i = 0; i < kMessages; ++i) {
    const bool has_fd = i % 2 == 0;
    outbox_->Post(Big(i), has_fd ? STDIN_FILENO : -1);
  }
  for (uint64_t i = 0; i < kMessages; ++i) {
    const auto received = worker_->Receive(Now() + kTestPatience);
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_EQ(std::get<ipc::Welcome>(received->message).epoch, i);
    EXPECT_EQ(received->fd.valid(), i % 2 == 0);
  }
}

TEST_F(OutboxTest, FullQueueIsReportedOnceAndThePosterGoesOn) {
  Open({.bytes = kThree, .patience = kTestPatience});
  for (uint64_t i = 0; i < 100; ++i) outbox_->Post(Big(i));  // a second report would throw
  const absl::Status why = Stuck();
  EXPECT_EQ(why.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(why.message()), HasSubstr("3 messages of 8"));
}

TEST_F(OutboxTest, WorkerThatReadsNothingForTooLongIsReported) {
  Open({.bytes = kThree, .patience = std::chrono::milliseconds(20)});
  for (uint64_t i = 0; i < 2; ++i) outbox_->Post(Big(i));
  const absl::Status why = Stuck();
  EXPECT_EQ(why.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(why.message()), HasSubstr("has read nothing for 0.02 s"));
}

TEST_F(OutboxTest, FlushWaitsForWhatIsPending) {
  Open({.bytes = kThree, .patience = kTestPatience});
  for (uint64_t i = 0; i < 2; ++i) outbox_->Post(Big(i));
  auto read = std::async(std::launch::async, [this] {
    for (uint64_t i = 0; i < 2; ++i) {
      if (!worker_->Receive(Now() + kTestPatience).ok()) return false;
    }
    return true;
  });
  outbox_->Flush(Now() + kTestPatience);
  outbox_.reset();  // what is left would be dropped
  EXPECT_TRUE(read.get());
}

TEST_F(OutboxTest, WorkerThatHasGoneIsLeftToItsReader) {
  Open({.bytes = kThree, .patience = kTestPatience});
  for (uint64_t i = 0; i < 2; ++i) outbox_->Post(Big(i));
  worker_.reset();
  outbox_->Flush(Now() + kTestPatience);
  outbox_->Post(Big(2));
  outbox_.reset();
  EXPECT_EQ(stuck_.get_future().wait_for(Duration::zero()), std::future_status::timeout);
}

}  // namespace
}  // namespace thalweg::outbox_test
