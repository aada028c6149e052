#include "server/sidecar/bucket/round_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "kernels/codec/dense.h"
#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::round_runner_test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// Waits for what a runner tells.
class FakeListener : public RoundRunner::Listener {
 public:
  void OnPlaced(const ipc::Placed& /*message*/) override {}
  void OnComplete(const ipc::Complete& message) override {
    MutexLock lock(mutex_);
    completed_.push_back(message);
    changed_.NotifyAll();
  }
  void OnFailed(const absl::Status& why) override {
    MutexLock lock(mutex_);
    failure_ = why;
    changed_.NotifyAll();
  }
  absl::StatusOr<ipc::Complete> Next() {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Now() + kTestPatience, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !completed_.empty() || !failure_.ok();
    });
    if (completed_.empty()) {
      return failure_.ok() ? absl::DeadlineExceededError("nothing was said") : failure_;
    }
    ipc::Complete first = completed_.front();
    completed_.pop_front();
    return first;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<ipc::Complete> completed_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

// One node of two; the test is the shard, and the other node.
class RoundRunnerTest : public BucketsFixture {
 protected:
  RoundRunnerTest() : BucketsFixture(HelloOf(0, 1), true) {}

  void Start(uint32_t workers, const char* codec = "fp32", Duration input_timeout = kTestPatience,
             std::optional<uint32_t> own_shard = {}) {
    hello_ = HelloOf(0, workers, codec);
    table_.Open(TermsOf(hello_, device_));
    const RoundTerms terms{1, 2, 2 * workers, {kTestPatience}, 1, true, own_shard};
    const InputTerms inputs{outcome_, report_, input_timeout, workers, [](uint32_t local_rank) {
                              return "rank " + std::to_string(5 + local_rank);
                            }};
    runner_ = std::make_unique<RoundRunner>(
        terms,
        RoundRunner::Context{outcome_, progress_, table_, states_, compression_, shards_, report_},
        inputs, listener_);
    run_ = Thread("run", [this] { runner_->RunLoop(); });
    finish_ = Thread("finish", [this] { runner_->FinishLoop(); });
  }
  void TearDown() override {
    outcome_.End();
    if (runner_ != nullptr) runner_->Wake();
  }
  // The mean over all nodes of a chunk that this one has sent is `value` everywhere.
  void Answer(NodeBucket& bucket, RoundId id, float value) {
    const Part& part = *bucket.FindPart(id.bucket.part).part;
    const std::vector<float> values(part.plan.Elems(id.chunk), value);
    RoundResult result;
    result.id = id;
    result.wire = WireFormat::kFloat32;
    result.elems = values.size();
    result.workers = hello_.world_size;
    result.payload = Payload(std::as_bytes(std::span(values)), nullptr);
    runner_->OnResult(0, result);
  }
  float ResultAt(NodeBucket& bucket, uint64_t element) {
    float value = 0;
    std::memcpy(&value, bucket.memory().result().payload() + element * sizeof value, sizeof value);
    return value;
  }

  JobOutcome outcome_{"job"};
  Progress progress_;
  RoundReport report_{hello_, metrics_, nullptr};
  FakeListener listener_;
  std::unique_ptr<RoundRunner> runner_;
  Thread run_, finish_;
};

TEST_F(RoundRunnerTest, RoundIsCompleteWithItsLastResultWhateverTheOrder) {
  Start(2);
  TestBucket made = Announce(table_, 3, 2000, 2);
  made.Fill(1);
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(runner_->Submit(rank, {{3, 0}, 1}).ok());
  ASSERT_TRUE(shard_.WaitForChunks(2, Now() + kTestPatience));
  Answer(*made.bucket, {{3, 0}, 1, 1}, 8);
  Answer(*made.bucket, {{3, 0}, 0, 1}, 7);
  const auto complete = listener_.Next();
  ASSERT_TRUE(complete.ok()) << complete.status();
  EXPECT_EQ(complete->round, 1u);
  EXPECT_EQ(complete->workers, 4u);
  EXPECT_EQ(complete->wire_bytes_sent, 8000u);
  EXPECT_EQ(complete->wire_bytes_received, 8000u);
  EXPECT_EQ(ResultAt(*made.bucket, 0), 7);
  EXPECT_EQ(ResultAt(*made.bucket, 1999), 8);
}

// A shard in this process refers to what a node has contributed, and folds it only when others have
// contributed, too: after the answer, where nodes need not be in the same round.
TEST_F(RoundRunnerTest, WhatIsAnsweredBeforeItIsFoldedStaysAsItWas) {
  UpdateRule stale, quorum;
  stale.ahead = 1;
  quorum.quorum = 1;
  std::vector<Payload> held;
  TestBucket made;
  shard_.on_contribute = [&](const Contribution& contribution) {
    held.push_back(contribution.payload);
    Answer(*made.bucket, contribution.id, 7);
  };
  Start(1, "fp32", kTestPatience, 0);
  for (UpdateRule* const rule : {&stale, &quorum}) {
    rule->groups = {0};
    const auto index = static_cast<uint32_t>(held.size());
    made = Announce(table_, index, 1000, 1, *rule);
    for (const uint32_t round : {1u, 2u}) {
      made.Fill(static_cast<float>(index + round));
      ASSERT_TRUE(runner_->Submit(0, {.id = {index, 0}, .round = round, .settings = 1}).ok());
      ASSERT_TRUE(listener_.Next().ok());
    }
  }
  ASSERT_EQ(held.size(), 4u);
  for (size_t i = 0; i < held.size(); ++i) {
    std::vector<float> values(1000);
    const auto out = std::as_writable_bytes(std::span(values));
    ASSERT_TRUE(DecodePayload(held[i], DType::kFloat32, DType::kFloat32, 1000, out.data()).ok());
    EXPECT_THAT(values, Each(static_cast<float>(i + 1)));
  }
}

TEST_F(RoundRunnerTest, ShardsAreToldTheLossScaleOfChunksWithResiduals) {
  Start(1, "int8:start=0;w4=fp32");
  runner_->NoteLossScale(1024);
  for (const uint32_t index : {3u, 4u}) {
    TestBucket made = Announce(table_, index, 1000, 1);
    made.Fill(1);
    ASSERT_TRUE(runner_->Submit(0, {{index, 0}, 1}).ok());
    ASSERT_TRUE(shard_.WaitForChunks(index - 2, Now() + kTestPatience));
  }
  EXPECT_EQ(shard_.loss_scales(), (std::vector<double>{1024, kUnknownLossScale}));
}

TEST_F(RoundRunnerTest, WaitsOfTheFirstWorkerAreCountedByQuarterOfTheModel) {
  Start(2);
  std::vector<TestBucket> made;
  for (const uint32_t index : {1u, 2u, 5u, 7u, 9u}) {
    made.push_back(Announce(table_, index, 10, 2));
  }
  const auto submit = [&](uint32_t rank, uint32_t index, uint64_t waited_ns) {
    return runner_->Submit(rank, {.id = {index, 0}, .round = 1, .waited_ns = waited_ns});
  };
  ASSERT_TRUE(submit(0, 9, 250'000'000).ok());  // the first of a forward pass
  ASSERT_TRUE(submit(0, 7, 500'000'000).ok());
  ASSERT_TRUE(submit(0, 1, 2'000'000'000).ok());
  ASSERT_TRUE(submit(1, 1, 1'000'000'000).ok());
  const auto waited = [&](const char* quarter) {
    return registry_
        .GetCounter("thalweg_sidecar_weights_wait_seconds_total", "", {{"quarter", quarter}})
        .Value();
  };
  EXPECT_EQ(waited("1"), 0.75);
  EXPECT_EQ(waited("4"), 2);
}

TEST_F(RoundRunnerTest, SmallBucketIsSentByTheThreadThatSubmitsIt) {
  Start(1);
  TestBucket made = Announce(table_, 3, 10, 1);
  made.Fill(1);
  ASSERT_TRUE(runner_->Submit(0, {{3, 0}, 1}).ok());
  ASSERT_TRUE(shard_.WaitForChunks(1, Now() + kTestPatience));
  Answer(*made.bucket, {{3, 0}, 0, 1}, 2);
  ASSERT_TRUE(listener_.Next().ok());
  runner_->WaitUntilIdle(Now() + kTestPatience);
  ASSERT_TRUE(runner_->Submit(0, {{3, 0}, 2}).ok());
  EXPECT_EQ(shard_.chunks().size(), 2u);
}

TEST_F(RoundRunnerTest, SmallBucketWhoseGradientIsNotThereIsLeftToTheRunThread) {
  Start(1);
  TestBucket made = Announce(table_, 3, 10, 1);
  made.Fill(1);
  ASSERT_TRUE(runner_->Submit(0, {{3, 0}, 1}).ok());
  ASSERT_TRUE(shard_.WaitForChunks(1, Now() + kTestPatience));
  Answer(*made.bucket, {{3, 0}, 0, 1}, 2);
  ASSERT_TRUE(listener_.Next().ok());
  runner_->WaitUntilIdle(Now() + kTestPatience);
  made.inputs[0].ResetReady();
  ASSERT_TRUE(runner_->Submit(0, {{3, 0}, 2}).ok());
  EXPECT_EQ(shard_.chunks().size(), 1u);
  made.Fill(1);
  EXPECT_TRUE(shard_.WaitForChunks(2, Now() + kTestPatience));
}

TEST_F(RoundRunnerTest, CompressedBucketGoesOnWithItsSecondPartWhenTheFirstIsHere) {
  Start(1, "powersgd:rank=1,start=0");
  const BucketLayout layout{DType::kFloat32, {{"matrix", {64, 64}}}};
  auto input = *BucketArena::Create("input", 64 * 64 * 4, true);
  TestBucket made{*table_.Announce(0, "rank 5", {{3, 0}, layout, {}}, UniqueFd(dup(input.fd()))),
                  {}};
  made.inputs.push_back(std::move(input));
  made.Fill(1);
  ASSERT_TRUE(runner_->Submit(0, {{3, 0}, 1}).ok());
  ASSERT_TRUE(shard_.WaitForChunks(1, Now() + kTestPatience));
  const RoundId first = shard_.chunks().back();
  EXPECT_EQ(first.bucket.part, 1u);
  Answer(*made.bucket, first, 1);
  ASSERT_TRUE(shard_.WaitForChunks(2, Now() + kTestPatience));
  const RoundId second = shard_.chunks().back();
  EXPECT_EQ(second.bucket.part, 2u);
  Answer(*made.bucket, second, 1);
  EXPECT_TRUE(listener_.Next().ok());
}

TEST_F(RoundRunnerTest, EmptyBucketIsCompleteAtOnce) {
  Start(1);
  TestBucket made = Announce(table_, 3, 0, 1);
  ASSERT_TRUE(runner_->Submit(0, {{3, 0}, 1}).ok());
  EXPECT_TRUE(listener_.Next().ok());
}

TEST_F(RoundRunnerTest, BucketThatNobodyHasAnnouncedIsRefused) {
  Start(1);
  Announce(table_, 3, 10, 1);
  for (const BucketId id : {BucketId{4, 0}, BucketId{3, 1}}) {
    EXPECT_THAT(std::string(runner_->Submit(0, {id, 1}).message()),
                HasSubstr("was submitted but never announced"));
  }
}

TEST_F(RoundRunnerTest, WorkerThatStopsFillingItsArenaIsNamed) {
  Start(2, "fp32", std::chrono::milliseconds(1));
  TestBucket made = Announce(table_, 3, 10, 2);
  made.inputs[0].PublishReady(1);
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(runner_->Submit(rank, {{3, 0}, 1}).ok());
  EXPECT_EQ(listener_.Next().status().message(),
            "rank 6 stopped filling bucket 3 round 1 at chunk 0");
}

TEST_F(RoundRunnerTest, ResultThatNobodyWaitsForFailsTheJobNamingTheShard) {
  Start(1);
  TestBucket made = Announce(table_, 3, 10, 1);
  Answer(*made.bucket, {{3, 0}, 0, 1}, 2);
  EXPECT_THAT(std::string(listener_.Next().status().message()),
              HasSubstr("aggregator shard 0: got 10 fp32 values in "));
}

TEST_F(RoundRunnerTest, WorkerThatLeavesWhileARoundWaitsForItIsNamed) {
  Start(2);
  TestBucket made = Announce(table_, 3, 10, 2);
  EXPECT_TRUE(runner_->OnWorkerLeft(0, "rank 5").ok()) << "nobody waits";
  EXPECT_THAT(std::string(runner_->Submit(1, {{3, 0}, 1}).message()),
              HasSubstr("rank 5 has left the job"));
}

TEST_F(RoundRunnerTest, RoundThatWaitsForAWorkerThatLeavesIsNamed) {
  Start(2);
  TestBucket made = Announce(table_, 3, 10, 2);
  ASSERT_TRUE(runner_->Submit(1, {{3, 0}, 1}).ok());
  EXPECT_EQ(runner_->OnWorkerLeft(0, "rank 5").message(),
            "rank 5 left while round 1 of bucket 3 waited for it");
}

}  // namespace
}  // namespace thalweg::round_runner_test
