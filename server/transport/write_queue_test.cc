#include "server/transport/write_queue.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace thalweg::write_queue_test {
namespace {

using Turn = WriteQueue::Turn;

grpc::ByteBuffer Frame(size_t bytes) {
  const grpc::Slice slice(std::string(bytes, 'x'));
  return grpc::ByteBuffer(&slice, 1);
}

class WriteQueueTest : public ::testing::Test {
 protected:
  double Queued() const { return counters_.queued_bytes.Value(); }
  uint64_t Sent() const {
    uint64_t count = 0;
    for (size_t i = 0; i <= Histogram::kBounds; ++i) count += counters_.send_seconds.Count(i);
    return count;
  }

  MetricRegistry metrics_;
  const StreamCounters counters_ = StreamCounters::In(metrics_, "client");
};

TEST_F(WriteQueueTest, FramesAreQueuedUntilTheyAreWritten) {
  WriteQueue queue(counters_);
  EXPECT_EQ(queue.Push(Frame(100)), Turn::kWrite);
  EXPECT_EQ(queue.Push(Frame(50)), Turn::kNothing);
  EXPECT_EQ(Queued(), 150);
  EXPECT_EQ(queue.Written(), Turn::kWrite);
  EXPECT_EQ(queue.current().Length(), 50u);
  EXPECT_EQ(Queued(), 50);
  EXPECT_EQ(queue.Written(), Turn::kNothing);
  EXPECT_EQ(Queued(), 0);
  EXPECT_EQ(Sent(), 2u);
}

TEST_F(WriteQueueTest, TurnWithoutAFrameIsNotTimed) {
  WriteQueue queue(counters_, WriteQueue::Start::kBusy);
  EXPECT_EQ(queue.Push(Frame(7)), Turn::kNothing);
  EXPECT_EQ(queue.Written(), Turn::kWrite);
  EXPECT_EQ(Sent(), 0u);
  EXPECT_EQ(Queued(), 7);
}

TEST_F(WriteQueueTest, DroppedFramesAreQueuedNoLonger) {
  WriteQueue queue(counters_);
  for (const size_t bytes : {1, 10, 100}) queue.Push(Frame(bytes));
  EXPECT_EQ(queue.PushLast(Frame(1000)), Turn::kNothing);
  EXPECT_EQ(Queued(), 1001);  // the frame being written, and the last
  EXPECT_EQ(queue.Push(Frame(5)), Turn::kNothing);
  EXPECT_EQ(queue.Close(), Turn::kNothing);
  EXPECT_EQ(queue.Written(), Turn::kWrite);
  EXPECT_EQ(queue.Written(), Turn::kEnd);
  EXPECT_EQ(Queued(), 0);
  EXPECT_EQ(Sent(), 2u);
}

TEST_F(WriteQueueTest, OnlyAnswersThatWaitAreCounted) {
  WriteQueue queue(counters_);
  for (const bool is_answer : {true, false, true, false, true}) queue.Push(Frame(1), is_answer);
  EXPECT_EQ(queue.WaitingAnswers(), 2u);  // the first one is being written
  EXPECT_EQ(queue.Written(), Turn::kWrite);
  EXPECT_EQ(queue.WaitingAnswers(), 2u);
  EXPECT_EQ(queue.Written(), Turn::kWrite);
  EXPECT_EQ(queue.WaitingAnswers(), 1u);
  queue.Close();
  EXPECT_EQ(queue.WaitingAnswers(), 0u);
}

TEST_F(WriteQueueTest, QueueThatIsClosedDropsWhatWaits) {
  WriteQueue queue(counters_);
  for (const size_t bytes : {1, 10}) queue.Push(Frame(bytes));
  EXPECT_EQ(queue.Close(), Turn::kNothing);
  EXPECT_EQ(Queued(), 1);
}

TEST_F(WriteQueueTest, NothingIsQueuedOnceTheQueueIsGone) {
  std::optional<WriteQueue> queue(std::in_place, counters_);
  for (const size_t bytes : {1, 10, 100}) queue->Push(Frame(bytes));
  EXPECT_EQ(Queued(), 111);
  queue.reset();
  EXPECT_EQ(Queued(), 0);
  EXPECT_EQ(Sent(), 0u);
}

}  // namespace
}  // namespace thalweg::write_queue_test
