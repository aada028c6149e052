#include "server/sidecar/bucket/bucket_round.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::bucket_round_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint32_t kWorkers = 2;
constexpr BucketId kId{3, 0};

class BucketRoundTest : public BucketsFixture {
 protected:
  BucketRoundTest() : BucketsFixture(HelloOf(0, kWorkers)) {}

  void SetUp() override {
    BucketsFixture::SetUp();
    bucket_ = Announce(table_, kId.index, 2000, kWorkers).bucket;  // two chunks
    round_ = &bucket_->round();
  }
  void SubmitAll(uint64_t number) {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      const auto queued = round_->Submit(rank, {kId, number}, start_ + std::chrono::seconds(rank));
      ASSERT_TRUE(queued.ok()) << queued.status();
      EXPECT_EQ(*queued, rank + 1 == kWorkers);
    }
  }
  // Lets the queued round run to its end; returns which tensors were unused in it.
  std::vector<bool> Run() {
    round_->Begin({}, kUnknownLossScale);
    round_->Finish(start_);
    return round_->unused();
  }
  BucketCodec& codec() { return bucket_->whole(); }
  Part& part() { return *codec().FindPart(0); }
  RoundResult Result(uint32_t chunk) {
    RoundResult result;
    result.id = {kId, chunk, part().round};
    result.workers = 4;
    result.wire = WireFormat::kFloat32;
    result.elems = part().plan.Elems(chunk);
    const auto bytes = std::make_shared<std::vector<std::byte>>(4 * result.elems);
    result.payload = Payload(*bytes, bytes);
    return result;
  }

  const TimePoint start_ = Now();
  std::shared_ptr<NodeBucket> bucket_;
  BucketRound* round_ = nullptr;
};

TEST_F(BucketRoundTest, LastWorkersSubmissionQueuesTheRoundAndThoseMissingAreNamed) {
  EXPECT_THAT(round_->waiting().missing, IsEmpty());
  ASSERT_FALSE(*round_->Submit(1, {kId, 1}, start_));
  EXPECT_FALSE(round_->in_flight());
  EXPECT_THAT(round_->waiting().missing, ElementsAre(0));
  EXPECT_TRUE(*round_->Submit(0, {kId, 1}, start_));
  EXPECT_TRUE(round_->in_flight());
  EXPECT_FALSE(round_->is_running());
  EXPECT_THAT(round_->waiting().missing, IsEmpty());
}

TEST_F(BucketRoundTest, SubmissionsOutOfOrderAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(round_->Submit(0, {kId, 2}, start_).status()));
  ASSERT_TRUE(round_->Submit(0, {kId, 1}, start_).ok());
  EXPECT_FALSE(round_->Submit(0, {kId, 1}, start_).ok()) << "twice";
  ASSERT_TRUE(round_->Submit(1, {kId, 1}, start_).ok());
  EXPECT_FALSE(round_->Submit(0, {kId, 2}, start_).ok()) << "round 1 is in flight";
}

TEST_F(BucketRoundTest, TensorIsUnusedInTheRoundWhereAllWorkersSaySo) {
  ASSERT_TRUE(round_->Submit(0, {kId, 1, {0}}, start_).ok());
  ASSERT_TRUE(round_->Submit(1, {kId, 1}, start_).ok());
  EXPECT_THAT(Run(), ElementsAre(false));
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(round_->Submit(rank, {kId, 2, {0}}, start_).ok());
  EXPECT_THAT(Run(), ElementsAre(true));
  SubmitAll(3);
  EXPECT_THAT(Run(), IsEmpty());
}

TEST_F(BucketRoundTest, RefusedSubmissionLeavesNothingBehind) {
  EXPECT_FALSE(round_->Submit(0, {kId, 1, {0, 1}}, start_).ok()) << "there is one tensor";
  EXPECT_FALSE(round_->Submit(0, {kId, 2, {0}}, start_).ok()) << "out of order";
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(round_->Submit(rank, {kId, 1, {0}}, start_).ok());
  EXPECT_THAT(Run(), ElementsAre(true));
}

TEST_F(BucketRoundTest, RoundEndsWithTheLastChunkOfItsLastCodecAndSaysWhatItTook) {
  SubmitAll(1);
  round_->Begin({&codec()}, 8);
  EXPECT_TRUE(round_->is_running());
  EXPECT_EQ(round_->loss_scale(), 8);
  EXPECT_THAT(round_->codecs(), ElementsAre(&codec()));
  round_->BeginPart(part());
  const TimePoint sent = start_ + std::chrono::seconds(10);
  const Duration second = std::chrono::seconds(1);
  for (uint32_t chunk : {0u, 1u}) round_->NoteSent(codec(), part(), chunk, 4000, second, sent);
  EXPECT_EQ(bucket_->Outstanding(), std::pair(2u, 2u));
  for (uint32_t chunk : {1u, 0u}) {
    const auto claimed = round_->Claim(part(), Result(chunk));
    ASSERT_TRUE(claimed.ok()) << claimed.status();
    EXPECT_EQ(*claimed, sent);
    EXPECT_EQ(round_->FinishChunk(codec(), part(), Result(chunk), second), chunk == 0);
  }
  EXPECT_EQ(bucket_->memory().result().WaitReady(2, Now()), 2u);
  EXPECT_TRUE(round_->FinishCodec(part()));

  const FinishedRound finished = round_->Finish(sent + std::chrono::seconds(5));
  EXPECT_EQ(finished.message.round, 1u);
  EXPECT_EQ(finished.message.workers, 4u);
  EXPECT_EQ(finished.message.wire_bytes_sent, 8000u);
  EXPECT_EQ(finished.message.wait_ns, 1'000'000'000u);
  EXPECT_EQ(finished.message.reduce_ns, 2'000'000'000u);
  EXPECT_EQ(finished.message.wire_ns, 5'000'000'000u);
  EXPECT_EQ(finished.message.decode_ns, 2'000'000'000u);
  EXPECT_EQ(finished.end, sent + std::chrono::seconds(5));
  EXPECT_FALSE(round_->in_flight());
  SubmitAll(2);
  EXPECT_EQ(round_->number(), 2u);
}

}  // namespace
}  // namespace thalweg::bucket_round_test
