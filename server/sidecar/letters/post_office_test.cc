// These tests let the workers of two nodes send to each other; what goes from node to node is
// delivered when the test says so.
#include "server/sidecar/letters/post_office.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/testing/test_patience.h"
#include "core/base/thread.h"
#include "server/shards/testing/fake_shard.h"
#include "server/sidecar/letters/letter.h"

namespace thalweg::post_office_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kGroup = 4;
constexpr uint64_t kTimeoutMs = 10'000;
constexpr TimePoint kStart{};

// A node with one worker, of local rank 0.
class Node : public CollectiveListener {
 public:
  explicit Node(uint32_t number) : number_(number) {
    EXPECT_TRUE(
        shards_
            .Join(
                {}, [](uint32_t) { return std::make_shared<NullSink>(); }, Now() + kTestPatience)
            .ok());
    shard_.on_contribute = [this](const Contribution& letter) {
      MutexLock lock(mutex_);
      sent_.push_back({letter.id, letter.payload});
    };
    post_.MakeGroup(0, {kGroup, number, {0, 1}, "ours"});
  }

  void OnMessage(uint32_t local_rank, const ipc::Message& message, int fd) override {
    EXPECT_EQ(local_rank, 0u);
    MutexLock lock(mutex_);
    if (const auto* done = std::get_if<ipc::Collected>(&message)) done_.push_back(*done);
    if (const auto* share = std::get_if<ipc::ShareArena>(&message)) {
      arena_.emplace(*BucketArena::Open(UniqueFd(dup(fd)), share->bytes));
    }
  }
  void OnCollectiveFailed(const absl::Status& why) override { failure_ = why; }
  std::function<void(uint32_t, const ipc::Message&)> Poster() override {
    return [](uint32_t, const ipc::Message&) {};
  }

  void Send(const std::string& values, uint64_t tag = 0) {
    ipc::Send send{kGroup, ++calls_, 1 - number_, tag, values.size(), kTimeoutMs, 0, values};
    const absl::Status sent = post_.Send(0, std::move(send));
    EXPECT_TRUE(sent.ok()) << sent;
  }
  absl::Status Receive(uint64_t bytes, uint64_t tag = 0) {
    return post_.Receive(0, {kGroup, ++calls_, 1 - number_, tag, bytes, kTimeoutMs});
  }
  // What the worker was told to be done: of a receive its values, of a send "".
  std::vector<std::string> Done() {
    MutexLock lock(mutex_);
    std::vector<std::string> done;
    for (const ipc::Collected& each : done_) {
      done.push_back(each.arena == 0 ? each.values
                                     : std::string(reinterpret_cast<const char*>(arena_->payload()),
                                                   each.bytes));
    }
    return done;
  }
  // Gives what this node has sent to the other one. Returns how many letters that were.
  size_t DeliverTo(Node& other) {
    size_t count = 0;
    for (;; ++count) {
      Sent next;
      {
        MutexLock lock(mutex_);
        if (sent_.empty()) return count;
        next = std::move(sent_.front());
        sent_.pop_front();
      }
      RoundResult letter;
      letter.id = next.id;
      letter.elems = next.payload.SizeBytes();
      letter.payload = std::move(next.payload);
      other.post_.OnLetter(letter);
    }
  }
  PostOffice& post() { return post_; }
  const absl::Status& failure() const { return failure_; }

 private:
  struct Sent {
    RoundId id;
    Payload payload;
  };

  const uint32_t number_;
  FakeShard shard_;
  MetricRegistry registry_;
  ShardGroup shards_{{&shard_}, registry_};
  Progress progress_;
  Arenas arenas_;
  uint64_t calls_ = 0;
  absl::Status failure_;
  Mutex mutex_;
  std::deque<Sent> sent_ ABSL_GUARDED_BY(mutex_);
  std::vector<ipc::Collected> done_ ABSL_GUARDED_BY(mutex_);
  std::optional<BucketArena> arena_ ABSL_GUARDED_BY(mutex_);
  Counter received_;
  PostOffice post_{{number_, 2, {}}, {progress_, shards_, arenas_, received_}, *this};
};

class PostOfficeTest : public ::testing::Test {
 protected:
  void DeliverAll() {
    while (nodes_[0].DeliverTo(nodes_[1]) + nodes_[1].DeliverTo(nodes_[0]) > 0) {
    }
  }
  // Lets the node leave, while letters go both ways.
  void Drain(Node& node, TimePoint deadline) {
    std::atomic<bool> is_over = false;
    Thread leaving("leaving", [&] {
      untaken_ = node.post().Drain(deadline, [] { return false; });
      is_over = true;
    });
    while (!is_over) DeliverAll();
  }

  size_t untaken_ = 0;  // of the last Drain
  Node nodes_[2] = {Node(0), Node(1)};
};

TEST_F(PostOfficeTest, ShortMessageIsSentAtOnceAndReceivedByItsTag) {
  nodes_[0].Send("seven", 7);
  EXPECT_THAT(nodes_[0].Done(), ElementsAre(""));
  ASSERT_TRUE(nodes_[1].Receive(4, 8).ok());
  ASSERT_TRUE(nodes_[1].Receive(5, 7).ok());
  EXPECT_THAT(nodes_[1].Done(), IsEmpty());
  DeliverAll();
  EXPECT_THAT(nodes_[1].Done(), ElementsAre("seven"));
  EXPECT_TRUE(nodes_[1].post().IsBusy());  // with tag 8
}

TEST_F(PostOfficeTest, LongMessageWaitsForItsReceiverAndComesWhole) {
  std::string values(3'000'000, 'a');
  for (size_t i = 0; i < values.size(); i += 1000)
    values[i] = static_cast<char>('a' + i / 1000 % 26);
  nodes_[0].Send(values);
  DeliverAll();
  EXPECT_THAT(nodes_[0].Done(), IsEmpty());
  ASSERT_TRUE(nodes_[1].Receive(values.size()).ok());
  DeliverAll();
  EXPECT_THAT(nodes_[0].Done(), ElementsAre(""));
  ASSERT_EQ(nodes_[1].Done().size(), 1u);
  EXPECT_EQ(nodes_[1].Done()[0], values);
  EXPECT_FALSE(nodes_[0].post().IsBusy());
}

TEST_F(PostOfficeTest, MessageOfAnotherSizeIsRefusedWithBothSizes) {
  nodes_[0].Send("four");
  DeliverAll();
  const absl::Status refused = nodes_[1].Receive(5);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("rank 0 sends 4 bytes to the receive of 5 bytes with tag 0 from rank 0"));
}

// Counts what two workers of one node are told to be done.
class Pair : public CollectiveListener {
 public:
  Pair() {
    for (const uint32_t rank : {0u, 1u}) post_.MakeGroup(rank, {kGroup, rank, {0, 0}, "ours"});
  }
  void OnMessage(uint32_t local_rank, const ipc::Message& message, int /*fd*/) override {
    if (std::holds_alternative<ipc::Collected>(message)) ++done_[local_rank];
  }
  void OnCollectiveFailed(const absl::Status& why) override { ADD_FAILURE() << why; }
  std::function<void(uint32_t, const ipc::Message&)> Poster() override {
    return [](uint32_t, const ipc::Message&) {};
  }

  int done(uint32_t local_rank) const { return done_[local_rank]; }
  PostOffice& post() { return post_; }

 private:
  std::atomic<int> done_[2] = {};
  MetricRegistry registry_;
  ShardGroup shards_{{}, registry_};
  Arenas arenas_;
  Progress progress_;
  Counter received_;
  PostOffice post_{{0, 1, {}}, {progress_, shards_, arenas_, received_}, *this};
};

TEST(LocalMessagesTest, SendersWaitForAReceiverThatHasMuchToTakeAlready) {
  constexpr uint64_t kBytes = 16 << 10;
  constexpr int kMessages = 1000;  // 16 MB
  Pair node;
  const std::string values(kBytes, 'x');
  for (uint64_t call = 1; call <= kMessages; ++call) {
    ipc::Send send{kGroup, call, 1, 0, kBytes, kTimeoutMs, 0, values};
    ASSERT_TRUE(node.post().Send(0, std::move(send)).ok());
  }
  EXPECT_GT(node.done(0), 100);
  EXPECT_LT(node.done(0), 300);  // 4 MiB
  for (uint64_t call = 1; call <= kMessages; ++call) {
    ASSERT_TRUE(node.post().Receive(1, {kGroup, call, 0, 0, kBytes, kTimeoutMs}).ok());
  }
  EXPECT_EQ(node.done(0), kMessages);
  EXPECT_EQ(node.done(1), kMessages);
}

TEST_F(PostOfficeTest, CallThatIsLateIsNamed) {
  ASSERT_TRUE(nodes_[1].Receive(5, 3).ok());
  EXPECT_TRUE(nodes_[1].post().CheckLate(Now(), kStart).ok());
  const TimePoint woken = Now() + std::chrono::seconds(10);
  EXPECT_TRUE(nodes_[1].post().CheckLate(woken + std::chrono::seconds(1), woken).ok());
  const absl::Status late = nodes_[1].post().CheckLate(Now() + std::chrono::seconds(11), kStart);
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()),
              HasSubstr("receive of 5 bytes with tag 3 from rank 0 on rank 1 of group 'ours'"));
}

TEST_F(PostOfficeTest, TimeoutOfAMessageBeginsAnewWheneverBytesOfItMove) {
  nodes_[0].Send(std::string(PostOffice::kMostOnTheWay + (2 << 20), 'x'));
  nodes_[0].DeliverTo(nodes_[1]);
  ASSERT_TRUE(nodes_[1].Receive(PostOffice::kMostOnTheWay + (2 << 20)).ok());
  const TimePoint begin = Now();
  nodes_[1].DeliverTo(nodes_[0]);
  nodes_[0].DeliverTo(nodes_[1]);
  for (Node& node : nodes_) {
    EXPECT_TRUE(node.post().IsBusy());
    EXPECT_TRUE(node.post().CheckLate(begin + FromMillis(kTimeoutMs), kStart).ok());
    EXPECT_THAT(
        std::string(node.post().CheckLate(Now() + std::chrono::seconds(11), kStart).message()),
        HasSubstr("no further byte has come or gone within the timeout of 10 s"));
  }
}

TEST_F(PostOfficeTest, WhatNobodyHasAskedForFailsTheJob) {
  const Letter request{.kind = LetterKind::kRequest, .message = 9, .offset = 100};
  RoundResult letter;
  letter.id = {LettersOf(1), 0, 1};
  letter.payload = Seal(request, {});
  nodes_[0].post().OnLetter(letter);
  EXPECT_THAT(std::string(nodes_[0].failure().message()),
              HasSubstr("message from node 1: it asks for 100 bytes of message 9"));
}

TEST_F(PostOfficeTest, NodeLeavesWhenWhatItHasSentIsReceived) {
  for (int i = 0; i < 100; ++i) nodes_[0].Send("more letters than a window has");
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(nodes_[1].Receive(30).ok());
  Drain(nodes_[0], Now() + kTestPatience);
  EXPECT_EQ(nodes_[1].Done().size(), 100u);
  EXPECT_EQ(untaken_, 0u);
  EXPECT_TRUE(nodes_[0].failure().ok()) << nodes_[0].failure();
  EXPECT_TRUE(nodes_[1].failure().ok()) << nodes_[1].failure();
}

TEST_F(PostOfficeTest, NodesWhoseMessagesNobodyReceivesLeaveAllTheSame) {
  nodes_[0].Send("nobody asks for it");
  DeliverAll();
  nodes_[1].Send("nor for this, which comes too late");
  Drain(nodes_[1], Now() + std::chrono::milliseconds(20));  // node 0 has not left
  EXPECT_EQ(untaken_, 1u);
  Drain(nodes_[0], Now() + kTestPatience);
  EXPECT_TRUE(nodes_[0].failure().ok()) << nodes_[0].failure();
  EXPECT_TRUE(nodes_[1].failure().ok()) << nodes_[1].failure();
}

TEST_F(PostOfficeTest, NodeThatGaveUpHearsNothingMoreOfWhatIsReceivedAfterwards) {
  nodes_[0].Send("late");
  DeliverAll();
  Drain(nodes_[0], Now() + std::chrono::milliseconds(20));
  EXPECT_EQ(untaken_, 1u);
  DeliverAll();  // what it sent last may still be on the way
  ASSERT_TRUE(nodes_[1].Receive(4).ok());
  EXPECT_THAT(nodes_[1].Done(), ElementsAre("late"));
  EXPECT_EQ(nodes_[1].DeliverTo(nodes_[0]), 0u);
}

TEST_F(PostOfficeTest, FailureEndsTheWaitForReceivers) {
  nodes_[0].Send("nobody asks for it");
  std::atomic<bool> has_failed = false;
  Thread leaving("leaving",
                 [&] { nodes_[0].post().Drain(kUntilStopped, [&] { return has_failed.load(); }); });
  has_failed = true;
  nodes_[0].post().Wake();
}

}  // namespace
}  // namespace thalweg::post_office_test
