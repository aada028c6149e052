#include "server/sidecar/workers/roster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>

#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::roster_test {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kWorkers = 2;

class RosterTest : public ::testing::Test {
 protected:
  absl::Status Admit(uint32_t local_rank,
                     const absl::Status& shares_gpu = absl::UnavailableError("no GPU")) {
    ends_.push_back(Connect());
    return roster_.Admit(HelloOf(local_rank, kWorkers), ends_.back().sidecar, shares_gpu);
  }
  absl::StatusOr<ipc::Message> Heard(size_t worker) {
    auto received = ends_[worker].worker->Receive(Now() + kTestPatience);
    if (!received.ok()) return received.status();
    return received->message;
  }

  MetricRegistry registry_;
  SidecarMetrics metrics_{registry_};
  JobOutcome outcome_{"job"};
  Roster roster_{HelloOf(0, kWorkers), metrics_, outcome_, [](const absl::Status&) {}};
  std::vector<WorkerEnds> ends_;
};

TEST_F(RosterTest, WorkerThatContradictsTheFirstOneIsRefusedNamingBoth) {
  EXPECT_TRUE(roster_.CheckSameJob(HelloOf(1, kWorkers)).ok());
  ipc::Hello hello = HelloOf(1, kWorkers);
  hello.codec = *CodecPolicy::Parse("fp16");
  const absl::Status refusal = roster_.CheckSameJob(hello);
  EXPECT_EQ(refusal.message(), "rank 6 says the codec is fp16, rank 5 says fp32");
}

TEST_F(RosterTest, SecondWorkerWithTheSameRankIsRefusedNamingTheProcess) {
  ASSERT_TRUE(Admit(0).ok());
  const absl::Status refusal = Admit(0);
  EXPECT_EQ(refusal.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(refusal.message()),
              HasSubstr("a rank 5 already (process " + std::to_string(getpid())));
}

TEST_F(RosterTest, GatherWaitsForTheLastWorker) {
  ASSERT_TRUE(Admit(0).ok());
  auto gathered = std::async(std::launch::async, [this] { return roster_.Gather(); });
  EXPECT_FALSE(roster_.has_gathered());
  ASSERT_TRUE(Admit(1).ok());
  EXPECT_TRUE(gathered.get().ok());
  EXPECT_TRUE(roster_.has_gathered());
}

TEST_F(RosterTest, GatherEndsWithTheJob) {
  auto gathered = std::async(std::launch::async, [this] { return roster_.Gather(); });
  outcome_.Fail(absl::AbortedError("because"));
  roster_.Wake();
  EXPECT_EQ(gathered.get().message(), "job 'job': because");
}

TEST_F(RosterTest, MessagesReachThoseThatAreHereEachWithItsPath) {
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(Admit(rank, absl::OkStatus()).ok());
  EXPECT_TRUE(roster_.ChoosePaths());
  EXPECT_EQ(roster_.first_path(), GradientPath::kIpc);
  roster_.Welcome({3, 1, "version", 4096, GradientPath::kCpu});
  for (const size_t worker : {0, 1}) {
    EXPECT_EQ(std::get<ipc::Welcome>(*Heard(worker)).path, GradientPath::kIpc);
  }
  roster_.Leave(0, absl::OkStatus());
  roster_.TellAll(ipc::Complete{{7, 0}, 1});
  EXPECT_EQ(std::get<ipc::Complete>(*Heard(1)).id.index, 7u);
  EXPECT_FALSE(ends_[0].worker->Receive(Now()).ok());
}

TEST_F(RosterTest, LostNodeIsToldOnceAndNotBeforeTheWelcome) {
  ASSERT_TRUE(Admit(0).ok());
  ASSERT_TRUE(Admit(1).ok());
  const ipc::Lost lost{"node 1 (x)", "is gone"};
  EXPECT_FALSE(roster_.TellLost(lost));
  roster_.Welcome({3, 1, "version", 4096, GradientPath::kCpu});
  EXPECT_TRUE(roster_.TellLost(lost));
  EXPECT_FALSE(roster_.TellLost({"node 1 (x)", "is silent, says another shard"}));
  roster_.TellAll(ipc::Alive{});
  for (const size_t worker : {0, 1}) {
    EXPECT_TRUE(std::holds_alternative<ipc::Welcome>(Heard(worker).value()));
    EXPECT_EQ(std::get<ipc::Lost>(Heard(worker).value()), lost);
    EXPECT_TRUE(std::holds_alternative<ipc::Alive>(Heard(worker).value()));
  }
}

TEST_F(RosterTest, GpusAreUsedOnlyWhenAllWorkersShareThem) {
  ASSERT_TRUE(Admit(0, absl::OkStatus()).ok());
  ASSERT_TRUE(Admit(1).ok());
  EXPECT_FALSE(roster_.ChoosePaths());
  EXPECT_EQ(roster_.first_path(), GradientPath::kCpu);
}

TEST_F(RosterTest, WorkerThatLeavesEarlyOrVanishesIsNamed) {
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(Admit(rank).ok());
  const Roster::Departure early = roster_.Leave(0, absl::OkStatus());
  EXPECT_FALSE(early.was_last);
  EXPECT_EQ(early.failure.message(), "rank 5 left before the job began");
  const Roster::Departure last = roster_.Leave(1, absl::UnavailableError("it crashed"));
  EXPECT_TRUE(last.was_last);
  EXPECT_EQ(last.failure.message(), "rank 6 on host1 is gone: it crashed");
  EXPECT_TRUE(roster_.IsOver());
}

TEST_F(RosterTest, WorkerThatComesWhenTheJobHasFailedIsToldWhyAndDoesNotCount) {
  ASSERT_TRUE(Admit(0).ok());
  outcome_.Fail(absl::AbortedError("because"));
  roster_.Leave(0, absl::OkStatus());
  EXPECT_EQ(Admit(1).message(), "job 'job': because");
  EXPECT_TRUE(roster_.IsOver());
}

TEST_F(RosterTest, JobThatFailsBeforeAnybodyIsHereIsOver) {
  EXPECT_FALSE(roster_.IsOver());
  outcome_.Fail(absl::AbortedError("because"));
  EXPECT_TRUE(roster_.IsOver());
}

TEST_F(RosterTest, FailedJobIsOverWithoutThoseThatNeverCame) {
  ASSERT_TRUE(Admit(0).ok());
  roster_.Leave(0, absl::OkStatus());
  EXPECT_FALSE(roster_.IsOver());
  outcome_.Fail(absl::AbortedError("because"));
  EXPECT_TRUE(roster_.IsOver());
}

TEST_F(RosterTest, WorkersThatHaveNotComeAreCounted) {
  ASSERT_TRUE(Admit(0).ok());
  constexpr Duration kTimeout = std::chrono::seconds(9);
  EXPECT_TRUE(roster_.CheckGathered(kTimeout, kTimeout).ok());
  EXPECT_THAT(std::string(roster_.CheckGathered(kTimeout * 2, kTimeout).message()),
              HasSubstr("only 1 of the 2 workers of host1 connected"));
  ASSERT_TRUE(Admit(1).ok());
  EXPECT_TRUE(roster_.CheckGathered(kTimeout * 2, kTimeout).ok());
}

}  // namespace
}  // namespace thalweg::roster_test
