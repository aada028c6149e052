#include "server/sidecar/bucket_round.h"

#include <gtest/gtest.h>

#include "server/sidecar/job_test_util.h"

namespace thalweg {
namespace {

constexpr uint32_t kWorkers = 2;
constexpr BucketId kId{3, 0};

class BucketRoundTest : public ::testing::Test {
 protected:
  void SetUp() override {
    table_.Open(TermsOf(hello_, device_));
    bucket_ = Announce(table_, kId.index, 2000, kWorkers).bucket;  // two chunks
  }
  void SubmitAll(uint64_t number) {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      const auto queued = round_.Submit(rank, number, start_ + std::chrono::seconds(rank));
      ASSERT_TRUE(queued.ok()) << queued.status();
      EXPECT_EQ(*queued, rank + 1 == kWorkers);
    }
  }
  BucketCodec& codec() { return bucket_->whole(); }
  Part& part() { return *codec().FindPart(0); }
  RoundResult Result(uint32_t chunk) {
    RoundResult result;
    result.id = {kId, chunk, part().round};
    result.workers = 4;
    return result;
  }

  const ipc::Hello hello_ = HelloOf(0, kWorkers);
  const TimePoint start_ = Now();
  CpuDevice device_;
  MetricRegistry registry_;
  SidecarMetrics metrics_{registry_};
  JobCompression compression_{"job", {}, 2, 1, metrics_};
  CodecStates states_;
  ShardGroup shards_{{}, registry_};
  BucketTable table_{states_, compression_, shards_};
  std::shared_ptr<NodeBucket> bucket_;
  BucketRound round_{kId, kWorkers};
};

TEST_F(BucketRoundTest, LastWorkersSubmissionQueuesTheRound) {
  EXPECT_TRUE(round_.MissingWorkers().empty());
  ASSERT_TRUE(round_.Submit(1, 1, start_).ok());
  EXPECT_FALSE(round_.in_flight());
  EXPECT_EQ(round_.MissingWorkers(), std::vector<uint32_t>{0});
  EXPECT_EQ(*round_.Submit(0, 1, start_), true);
  EXPECT_TRUE(round_.in_flight());
  EXPECT_FALSE(round_.is_running());
  EXPECT_TRUE(round_.MissingWorkers().empty());
}

TEST_F(BucketRoundTest, SubmissionsOutOfOrderAreRefused) {
  EXPECT_EQ(round_.Submit(0, 2, start_).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(round_.Submit(0, 1, start_).ok());
  EXPECT_FALSE(round_.Submit(0, 1, start_).ok());  // twice
  ASSERT_TRUE(round_.Submit(1, 1, start_).ok());
  EXPECT_FALSE(round_.Submit(0, 2, start_).ok());  // in flight
}

TEST_F(BucketRoundTest, RoundEndsWithTheLastChunkOfItsLastCodecAndSaysWhatItTook) {
  SubmitAll(1);
  round_.Begin({&codec()}, 8);
  EXPECT_TRUE(round_.is_running());
  EXPECT_EQ(round_.loss_scale(), 8);
  part().BeginRound();
  const TimePoint sent = start_ + std::chrono::seconds(10);
  for (uint32_t chunk : {0u, 1u}) round_.NoteSent(codec(), part(), chunk, 4000, sent);
  EXPECT_FALSE(round_.FinishChunk(codec(), part(), Result(1)));
  EXPECT_TRUE(round_.FinishChunk(codec(), part(), Result(0)));
  EXPECT_EQ(round_.finished_chunks(), 2u);
  EXPECT_TRUE(round_.FinishCodec(part()));

  const FinishedRound finished = round_.Finish(sent + std::chrono::seconds(5));
  EXPECT_EQ(finished.message.round, 1u);
  EXPECT_EQ(finished.message.workers, 4u);
  EXPECT_EQ(finished.message.wire_bytes_sent, 8000u);
  EXPECT_EQ(finished.message.wait_ns, 1'000'000'000u);
  EXPECT_EQ(finished.message.wire_ns, 5'000'000'000u);
  EXPECT_FALSE(round_.in_flight());
  SubmitAll(2);
  EXPECT_EQ(round_.number(), 2u);
}

}  // namespace
}  // namespace thalweg
