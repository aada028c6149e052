#include "server/shards/send_lane.h"

#include <gtest/gtest.h>

#include <vector>

namespace thalweg::send_lane_test {
namespace {

// The second shard has twice the first one's share.
constexpr uint32_t kSmall = 0;
constexpr uint32_t kLarge = 1;

class SendLaneTest : public ::testing::Test {
 protected:
  explicit SendLaneTest(const std::vector<uint32_t>& windows = {4, 8})
      : lane_(windows, {1, 2}, std::vector<Counter*>{&waited_, &waited_}) {}

  // Adds `count` times a chunk for the small shard and two for the large one.
  void PushInTurns(int count) {
    for (int i = 0; i < count; ++i) {
      for (const uint32_t shard : {kSmall, kLarge, kLarge}) {
        Contribution chunk;
        chunk.id.chunk = chunks_++;
        std::ignore = lane_.Push(shard, std::move(chunk));
      }
    }
  }
  // Returns how many chunks may go to the shard now.
  int Send(uint32_t shard) {
    int count = 0;
    while (lane_.Next(shard, now_)) ++count;
    return count;
  }
  // The shard answers all chunks that it has.
  void Answer(uint32_t shard) {
    for (uint32_t left = lane_.owed(shard); left > 0; --left) {
      std::ignore = lane_.NoteAnswered(shard);
    }
  }

  MetricRegistry registry_;
  Counter& waited_ = registry_.GetCounter("waited", "");
  TimePoint now_ = Now();
  uint32_t chunks_ = 0;
  SendLane lane_;  // a shard may lead by 6
};

TEST_F(SendLaneTest, EachShardGetsItsWindowWhileBothKeepPace) {
  PushInTurns(4);
  EXPECT_EQ(Send(kLarge), 5);  // up to 6, the lead; the place of the other one's oldest chunk is 0
  Answer(kLarge);
  EXPECT_EQ(Send(kSmall), 4);  // up to 9; the oldest one is at 7.5
  Answer(kSmall);
  PushInTurns(4);
  EXPECT_EQ(Send(kLarge), 8);  // up to 18; the oldest one is at 12
}

TEST_F(SendLaneTest, ShardThatIsAheadGetsOneChunkAtATimeUntilTheOtherHasCaughtUp) {
  PushInTurns(100);
  ASSERT_EQ(Send(kSmall), 3);  // 0, 3, 6; the oldest chunk of the other one is at 0
  ASSERT_EQ(Send(kLarge), 5);
  for (int i = 0; i < 10; ++i) {
    Answer(kSmall);
    EXPECT_EQ(Send(kSmall), 1);
  }
  for (int i = 0; i < 3; ++i) {
    Answer(kLarge);
    EXPECT_EQ(Send(kLarge), 8);
  }
  Answer(kLarge);
  Answer(kSmall);
  EXPECT_EQ(Send(kSmall), 4);  // 39 to 48; the oldest chunk of the other one is at 43.5
}

TEST_F(SendLaneTest, ShardsWhoseChunksComeOneShardAfterTheOtherKeepPace) {
  for (int i = 0; i < 100; ++i) std::ignore = lane_.Push(kSmall, {});
  for (int i = 0; i < 200; ++i) std::ignore = lane_.Push(kLarge, {});
  EXPECT_EQ(Send(kSmall), 3);
  EXPECT_EQ(Send(kLarge), 5);
  Answer(kSmall);
  Answer(kLarge);
  EXPECT_EQ(Send(kLarge), 6);  // 7.5 to 15; the oldest chunk of the other one is at 9
  EXPECT_EQ(Send(kSmall), 2);  // 9, 12; the oldest one is at 7.5
}

TEST_F(SendLaneTest, ShardThatHadNothingToDoGetsNoLeadForIt) {
  for (int i = 0; i < 100; ++i) {
    std::ignore = lane_.Push(kLarge, {});
    ASSERT_EQ(Send(kLarge), 1);
    Answer(kLarge);
  }
  PushInTurns(100);
  EXPECT_EQ(Send(kSmall), 3);
  EXPECT_GE(Send(kLarge), 4);
}

TEST_F(SendLaneTest, ShardWithoutChunksHoldsNoOtherUp) {
  for (int i = 0; i < 100; ++i) std::ignore = lane_.Push(kLarge, {});
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(Send(kLarge), 8);
    Answer(kLarge);
  }
}

class RoundedWindowsTest : public SendLaneTest {
 protected:
  RoundedWindowsTest() : SendLaneTest({5, 9}) {}
};

TEST_F(RoundedWindowsTest, ShardsAreDoneTogetherThoughTheirWindowsDifferFromTheirShares) {
  PushInTurns(1000);
  int small = 0, large = 0;
  while (small < 1000) {
    small += Send(kSmall);
    large += Send(kLarge);
    Answer(kSmall);
    Answer(kLarge);
  }
  EXPECT_GT(large, 2000 - 2 * 7);  // the lead is 7 chunks of both
}

TEST_F(SendLaneTest, ClosingReturnsWhatWaitsForEveryShard) {
  PushInTurns(10);
  const int sent = Send(kLarge) + Send(kSmall);
  EXPECT_EQ(lane_.Close().size(), static_cast<size_t>(30 - sent));
  EXPECT_EQ(Send(kLarge) + Send(kSmall), 0);
}

// A lane with one shard, which may owe two results.
class OneShardTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kWindow = 2;

  bool Push(uint32_t number) {
    Contribution chunk;
    chunk.id.chunk = number;
    return lane_.Push(0, std::move(chunk));
  }
  // The numbers of the chunks that may be sent now.
  std::vector<uint32_t> Sent() {
    std::vector<uint32_t> numbers;
    while (const auto chunk = lane_.Next(0, now_)) numbers.push_back(chunk->id.chunk);
    return numbers;
  }

  MetricRegistry registry_;
  Counter& waited_ = registry_.GetCounter("waited", "");
  TimePoint now_ = Now();
  SendLane lane_{{kWindow}, {1}, std::vector<Counter*>{&waited_}};
};

TEST_F(OneShardTest, ChunksBeyondTheWindowWaitInOrderForAnswers) {
  EXPECT_TRUE(Push(0));
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{0}));
  for (const uint32_t number : {1, 2, 3}) {
    EXPECT_TRUE(Push(number));
    EXPECT_EQ(Sent(), number == 1 ? std::vector<uint32_t>{1} : std::vector<uint32_t>{});
  }
  EXPECT_EQ(lane_.owed(0), kWindow);
  EXPECT_TRUE(lane_.NoteAnswered(0));
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{2}));
  EXPECT_TRUE(lane_.NoteAnswered(0));
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{3}));
}

TEST_F(OneShardTest, OneCallerSendsWhatOthersAddMeanwhile) {
  ASSERT_TRUE(Push(0));
  EXPECT_FALSE(Push(1));
  ASSERT_TRUE(lane_.Next(0, now_).has_value());
  // The answer comes while the first caller still sends.
  EXPECT_FALSE(lane_.NoteAnswered(0));
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{1}));
  EXPECT_TRUE(lane_.NoteAnswered(0));
}

TEST_F(OneShardTest, TimeIsCountedWhileChunksWaitForAPlace) {
  for (const uint32_t number : {0, 1, 2}) {
    ASSERT_TRUE(Push(number));
    Sent();
  }
  now_ += std::chrono::seconds(3);
  ASSERT_TRUE(lane_.NoteAnswered(0));
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{2}));
  EXPECT_DOUBLE_EQ(waited_.Value(), 3);
}

}  // namespace
}  // namespace thalweg::send_lane_test
