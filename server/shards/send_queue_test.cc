#include "server/shards/send_queue.h"

#include <gtest/gtest.h>

#include <vector>

namespace thalweg::send_queue_test {
namespace {

constexpr uint32_t kWindow = 2;

class SendQueueTest : public ::testing::Test {
 protected:
  static Contribution Chunk(uint32_t number) {
    Contribution chunk;
    chunk.id.chunk = number;
    return chunk;
  }
  // The numbers of the chunks that may be sent now.
  std::vector<uint32_t> Sent() {
    std::vector<uint32_t> numbers;
    while (const auto chunk = queue_.Next(kWindow, now_)) numbers.push_back(chunk->id.chunk);
    return numbers;
  }

  MetricRegistry registry_;
  Counter& waited_ = registry_.GetCounter("waited", "");
  TimePoint now_ = Now();
  SendQueue queue_{waited_};
};

TEST_F(SendQueueTest, ChunksBeyondTheWindowWaitInOrderForAnswers) {
  EXPECT_TRUE(queue_.Push(Chunk(0), 0));
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{0}));
  for (const uint32_t number : {1, 2, 3}) {
    EXPECT_TRUE(queue_.Push(Chunk(number), number));
    EXPECT_EQ(Sent(), number == 1 ? std::vector<uint32_t>{1} : std::vector<uint32_t>{});
  }
  EXPECT_EQ(queue_.owed(), kWindow);
  EXPECT_EQ(queue_.oldest(), 0u);
  EXPECT_EQ(queue_.next(), 2u);
  EXPECT_TRUE(queue_.NoteAnswered());
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{2}));
  EXPECT_TRUE(queue_.NoteAnswered());
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{3}));
}

TEST_F(SendQueueTest, OneCallerSendsWhatOthersAddMeanwhile) {
  ASSERT_TRUE(queue_.Push(Chunk(0), 0));
  EXPECT_FALSE(queue_.Push(Chunk(1), 1));
  ASSERT_TRUE(queue_.Next(kWindow, now_).has_value());
  // The answer comes while the first caller still sends.
  EXPECT_FALSE(queue_.NoteAnswered());
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{1}));
  EXPECT_TRUE(queue_.NoteAnswered());
}

TEST_F(SendQueueTest, TimeIsCountedWhileChunksWaitForAPlace) {
  for (const uint32_t number : {0, 1, 2}) {
    ASSERT_TRUE(queue_.Push(Chunk(number), number));
    Sent();
  }
  now_ += std::chrono::seconds(3);
  ASSERT_TRUE(queue_.NoteAnswered());
  EXPECT_EQ(Sent(), (std::vector<uint32_t>{2}));
  EXPECT_DOUBLE_EQ(waited_.Value(), 3);
}

TEST_F(SendQueueTest, ClosingReturnsWhatWasNotSent) {
  for (const uint32_t number : {0, 1, 2}) {
    ASSERT_TRUE(queue_.Push(Chunk(number), number));
    Sent();
  }
  EXPECT_EQ(queue_.Close().size(), 1u);
  EXPECT_TRUE(queue_.NoteAnswered());
  EXPECT_TRUE(Sent().empty());
}

}  // namespace
}  // namespace thalweg::send_queue_test
