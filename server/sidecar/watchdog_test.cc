#include "server/sidecar/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::watchdog_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr TimePoint kStart = TimePoint(std::chrono::hours(1));
constexpr Duration kJustLate = std::chrono::milliseconds(4'501);  // 90 % of the timeout, and more
constexpr uint32_t kWorkers = 2;

// Time passes as the test says.
class NoCollectives : public CollectiveListener {
 public:
  void OnMessage(uint32_t, const ipc::Message&, int) override {}
  void OnCollectiveFailed(const absl::Status&) override {}
  std::function<void(uint32_t, const ipc::Message&)> Poster() override {
    return [](uint32_t, const ipc::Message&) {};
  }
};

class WatchdogTest : public BucketsFixture {
 protected:
  WatchdogTest() : BucketsFixture(HelloOf(0, kWorkers), true) {}

  void AdmitAll() {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      ends_.push_back(Connect());
      ASSERT_TRUE(
          roster_
              .Admit(HelloOf(rank, kWorkers), ends_[rank].sidecar, absl::UnavailableError("no GPU"))
              .ok());
    }
    ASSERT_TRUE(roster_.Gather().ok());
    // They have come at a time of the real clock.
    HearAll(TimePoint());
  }
  void HearAll(TimePoint now) {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) roster_.Heard(rank, now);
  }
  void SubmitAll(NodeBucket& bucket, TimePoint now) {
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      ASSERT_TRUE(bucket.Submit(rank, {bucket.id(), 1}, now).ok());
    }
  }
  std::string Late(TimePoint now) {
    const absl::Status status = watchdog_.Look(now, awake_since_);
    EXPECT_TRUE(status.ok() || absl::IsDeadlineExceeded(status)) << status;
    return std::string(status.message());
  }

  TimePoint awake_since_ = kStart;
  JobOutcome outcome_{"job"};
  Progress progress_;
  Roster roster_{hello_, metrics_, outcome_, [](const absl::Status&) {}};
  NoCollectives nobody_;
  Arenas arenas_;
  const JobTrace trace_;
  CollectiveRunner collectives_{
      {}, {outcome_, progress_, shards_, arenas_, trace_, metrics_.collectives}, nobody_};
  PostOffice post_{{}, {progress_, shards_, arenas_, metrics_.collectives}, nobody_};
  Watchdog watchdog_{{{std::chrono::seconds(5)}, {std::chrono::seconds(50)}},
                     kStart,
                     {outcome_, roster_, table_, collectives_, post_, progress_, shards_}};
  std::vector<WorkerEnds> ends_;
};

TEST_F(WatchdogTest, WorkersThatDoNotConnectAreMissedAfterNineTenthsOfTheTimeout) {
  EXPECT_EQ(Late(kStart + std::chrono::milliseconds(4'500)), "");
  EXPECT_THAT(Late(kStart + kJustLate),
              AllOf(HasSubstr("only 0 of the 2 workers of host1 connected within 4.5 s"),
                    HasSubstr("THALWEG_TIMEOUT")));
}

TEST_F(WatchdogTest, WorkerThatDoesNotSubmitIsNamed) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 10, kWorkers);
  const TimePoint submitted = kStart + std::chrono::hours(1);
  HearAll(submitted);
  ASSERT_TRUE(bucket.bucket->Submit(0, {bucket.bucket->id(), 1}, submitted).ok());
  EXPECT_EQ(Late(submitted + std::chrono::milliseconds(4'500)), "");
  EXPECT_THAT(Late(submitted + kJustLate), HasSubstr("bucket 3 round 1: rank 6 did not submit"));
}

TEST_F(WatchdogTest, TimeInWhichTheProcessDidNotRunIsNotHeldAgainstWorkers) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 10, kWorkers);
  ASSERT_TRUE(bucket.bucket->Submit(0, {bucket.bucket->id(), 1}, kStart).ok());
  awake_since_ = kStart + 10 * kJustLate;
  EXPECT_EQ(Late(awake_since_), "");
  EXPECT_THAT(Late(awake_since_ + kJustLate), HasSubstr("rank 6 did not submit"));
}

TEST_F(WatchdogTest, TimeInWhichTheProcessDidNotRunIsNotHeldAgainstCollectives) {
  constexpr Duration kLimit = std::chrono::seconds(10);
  const auto begin = [&](uint32_t rank) {
    ASSERT_TRUE(collectives_.Collect(rank, {.group = 4, .sequence = 1, .timeout_ms = 10'000}).ok());
  };
  AdmitAll();
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    ASSERT_TRUE(collectives_.MakeGroup(rank, {4, rank, {0, 0, 1}, "ours"}).ok());
  }
  begin(0);
  const auto expect_late_from = [&](TimePoint awake, Duration after, const char* what) {
    awake_since_ = awake;
    HearAll(awake + after);
    EXPECT_EQ(Late(awake + after), "");
    EXPECT_THAT(Late(awake + after + std::chrono::milliseconds(1)), HasSubstr(what));
  };
  expect_late_from(Now() + 10 * kLimit, kLimit, "rank 1 of the group did not come within");
  begin(1);
  ASSERT_TRUE(shard_.WaitForChunks(1, Now() + kTestPatience));
  // Shards, which report a late round themselves, have 2 s more.
  expect_late_from(Now() + 20 * kLimit, kLimit + std::chrono::seconds(2),
                   "1 of 1 chunks did not come back within");
  outcome_.End();
}

TEST_F(WatchdogTest, WorkersThatDoNotFillTheirArenaAreNamed) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 10, kWorkers);
  SubmitAll(*bucket.bucket, kStart);
  bucket.bucket->BeginRound(kUnknownLossScale);
  bucket.inputs[1].PublishReady(1);
  EXPECT_THAT(Late(kStart + kJustLate),
              HasSubstr("bucket 3 round 1: rank 5 did not make all of the gradient"));
}

TEST_F(WatchdogTest, ResultsThatDoNotComeAreCountedFromTheLastProgress) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 1500, kWorkers);
  bucket.Fill(1);
  SubmitAll(*bucket.bucket, kStart);
  bucket.bucket->BeginRound(kUnknownLossScale);
  bucket.bucket->round().BeginPart(bucket.bucket->whole().part());
  const TimePoint last = kStart + std::chrono::seconds(5);
  progress_.Note(last);
  HearAll(last + 10 * kJustLate);
  EXPECT_EQ(Late(kStart + 10 * kJustLate), "");
  EXPECT_THAT(Late(last + 10 * kJustLate),
              HasSubstr("bucket 3 round 1: 2 of 2 chunks did not come back"));
}

TEST_F(WatchdogTest, WorkerThatIsAliveMayTakeAStepsTime) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 10, kWorkers);
  ASSERT_TRUE(bucket.bucket->Submit(0, {bucket.bucket->id(), 1}, kStart).ok());
  const TimePoint late = kStart + 10 * kJustLate;
  HearAll(late - std::chrono::seconds(4));
  EXPECT_EQ(Late(late - std::chrono::seconds(1)), "");
  EXPECT_THAT(Late(late), AllOf(HasSubstr("rank 6 did not submit within 45 s"),
                                HasSubstr("THALWEG_STEP_TIMEOUT")));
}

TEST_F(WatchdogTest, OnlyTheWorkerThatIsSilentIsNamedWhileOthersAreLate) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 10, kWorkers);
  SubmitAll(*bucket.bucket, kStart);
  bucket.bucket->BeginRound(kUnknownLossScale);
  const TimePoint late = kStart + kJustLate;
  roster_.Heard(1, late);
  EXPECT_THAT(Late(late),
              HasSubstr("bucket 3 round 1: rank 5 did not make all of the gradient within 4.5 s"));
}

TEST_F(WatchdogTest, SilentWorkerIsNamedThoughNobodyHereWaitsForIt) {
  AdmitAll();
  const TimePoint late = kStart + std::chrono::milliseconds(5'001);
  roster_.Heard(0, late);
  roster_.Heard(1, kStart);
  awake_since_ = late;  // it could not hear what was said before
  EXPECT_EQ(Late(late), "");
  awake_since_ = kStart;
  EXPECT_THAT(Late(late), HasSubstr("rank 6 showed no sign of life within 5 s"));
}

TEST_F(WatchdogTest, ShardThatAnswersHeartbeatsMayTakeAStepsTime) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 1500, kWorkers);
  bucket.Fill(1);
  const TimePoint begin = Now() - kJustLate;
  SubmitAll(*bucket.bucket, begin);
  bucket.bucket->BeginRound(kUnknownLossScale);
  bucket.bucket->round().BeginPart(bucket.bucket->whole().part());
  ASSERT_TRUE(shards_.Contribute(0, {}).ok());
  ASSERT_TRUE(shards_.Heartbeat(0).ok());  // reads the real clock
  awake_since_ = begin;
  HearAll(begin + kJustLate);
  EXPECT_EQ(Late(begin + kJustLate), "");
  const TimePoint late = Now() + kJustLate + 3 * kHeartbeatInterval;
  HearAll(late);
  EXPECT_THAT(Late(late), HasSubstr("missing are aggregator shard 0 (1 results) within 4.5 s"));
}

TEST_F(WatchdogTest, BucketThatWaitsForItsTurnIsNotBlamed) {
  AdmitAll();
  TestBucket bucket = Announce(table_, 3, 10, kWorkers);
  SubmitAll(*bucket.bucket, kStart);
  EXPECT_EQ(Late(kStart + kJustLate), "");
}

TEST_F(WatchdogTest, WatchEndsWithTheJob) {
  Thread watching("watching", [this] { watchdog_.Watch([](const absl::Status&) {}, [] {}); });
  outcome_.End();
  watching.Join();
}

}  // namespace
}  // namespace thalweg::watchdog_test
