#include "server/sidecar/collective/flight_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

namespace thalweg::flight_record_test {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

ipc::Collect AllReduce(uint64_t sequence) {
  ipc::Collect spec;
  spec.group = 1;
  spec.sequence = sequence;
  spec.kind = CollectiveKind::kAllReduce;
  spec.fold = Fold::kMean;
  spec.dtype = DType::kFloat32;
  spec.elems = 1024;
  return spec;
}

TEST(FlightRecordTest, SaysHowFarEachCollectiveHasCome) {
  const TimePoint begin = Now();
  FlightRecord record({});
  EXPECT_THAT(record.Lines(begin), IsEmpty());
  record.NoteCame("default", AllReduce(7), 1, begin);
  record.NoteCame("default", AllReduce(7), 0, begin + seconds(1));
  record.NoteSent(AllReduce(7), begin + seconds(1));
  record.NoteDone(AllReduce(7), begin + seconds(2));
  ipc::Collect broadcast = AllReduce(8);
  broadcast.kind = CollectiveKind::kBroadcast;
  broadcast.root = 3;
  record.NoteCame("default", broadcast, 1, begin + seconds(3));
  EXPECT_THAT(
      record.Lines(begin + seconds(10)),
      ElementsAre("allreduce 7 of group 'default', mean of 1024 elements of fp32: rank 1 came "
                  "10.000 s ago, rank 0 came 9.000 s ago, sent 9.000 s ago, done 8.000 s ago",
                  "broadcast 8 of group 'default', 1024 elements of fp32 at root 3: rank 1 came "
                  "7.000 s ago, not sent, not done"));
}

TEST(FlightRecordTest, KeepsTheLatestOnly) {
  FlightRecord record({});
  const TimePoint now = Now();
  for (uint64_t sequence = 1; sequence <= FlightRecord::kMost + 1; ++sequence) {
    record.NoteCame("default", AllReduce(sequence), 0, now);
  }
  record.NoteDone(AllReduce(1), now);  // is not kept any more
  const auto lines = record.Lines(now);
  ASSERT_EQ(lines.size(), FlightRecord::kMost);
  EXPECT_TRUE(lines.front().starts_with("allreduce 2 of group"));
}

}  // namespace
}  // namespace thalweg::flight_record_test
