// These tests check what a shard reports about its jobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/thread.h"
#include "server/aggregator/aggregator.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::job_report_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint64_t kElems = 100;
constexpr BucketId kBucket{0, 0, 0};
constexpr BucketId kFactors{0, 0, 1};
const Bytes kFp16(2 * kElems);

Duration Millis(int n) { return std::chrono::milliseconds(n); }

RoundId Chunk(BucketId bucket, uint64_t round) { return {bucket, 0, round}; }

Contribution Share(BucketId bucket, uint64_t round, const Bytes& bytes) {
  return {Chunk(bucket, round), 1, WireFormat::kFloat16, kElems, Split(bytes, {})};
}

TEST(JobReportTest, SaysWhoseContributionWasLastAndHowLongTheOthersWaited) {
  TestJob job({1, 1, 1});
  job.Register(kBucket, kElems, WireFormat::kFloat16);
  const TimePoint start = Now();
  const std::vector<std::pair<uint32_t, int>> arrivals = {{0, 0}, {2, 3}, {1, 10}};
  for (const auto& [node, ms] : arrivals) {
    ASSERT_TRUE(job.job().Contribute(node, Share(kBucket, 1, kFp16), start + Millis(ms)).ok());
  }
  ASSERT_TRUE(job.job().Contribute(2, Share(kBucket, 2, kFp16), start + Millis(20)).ok());

  const JobReport report = job.job().Report(start + Millis(25));
  EXPECT_EQ(report.state, JobReport::State::kRunning);
  EXPECT_EQ(report.rounds_completed, 1u);
  EXPECT_EQ(report.contributions, 4u);
  EXPECT_EQ(report.wait_time, Millis(10));
  ASSERT_THAT(report.nodes, SizeIs(3));
  EXPECT_EQ(report.nodes[1].name, "host1");
  EXPECT_EQ(report.nodes[1].last_rounds, 1u);
  EXPECT_EQ(report.nodes[1].waited, Millis(7));
  EXPECT_EQ(report.nodes[1].silent, Millis(15));
  EXPECT_EQ(report.nodes[2].last_rounds, 0u);
  EXPECT_EQ(report.open_rounds, 1u);
  ASSERT_TRUE(report.waiting);
  EXPECT_EQ(report.waiting->round, Chunk(kBucket, 2));
  EXPECT_EQ(report.waiting->open, Millis(5));
  EXPECT_THAT(report.waiting->missing, ElementsAre(0u, 1u));
}

TEST(JobReportTest, SaysHowOftenANodesConnectionsCameBack) {
  TestJob job({1, 1});
  job.sink(1).reconnections = 3;
  const JobReport report = job.job().Report(Now());
  ASSERT_THAT(report.nodes, SizeIs(2));
  EXPECT_EQ(report.nodes[0].reconnections, 0u);
  EXPECT_EQ(report.nodes[1].reconnections, 3u);
}

TEST(JobReportTest, CountsBytesBeforeAndAfterEncodingInBothDirections) {
  TestJob job({1, 1});
  job.Register(kBucket, kElems, WireFormat::kFloat16, 4 * kElems);
  job.Register(kFactors, kElems, WireFormat::kFloat16, 8000);
  for (const BucketId bucket : {kBucket, kFactors}) {
    for (uint32_t node : {0, 1}) {
      ASSERT_TRUE(job.job().Contribute(node, Share(bucket, 1, kFp16), Now()).ok());
    }
  }
  const JobReport report = job.job().Report(Now());
  ASSERT_THAT(report.formats, SizeIs(2));
  EXPECT_FALSE(report.formats[0].factors);
  EXPECT_EQ(report.formats[0].received.raw_bytes, 2 * 4 * kElems);
  EXPECT_EQ(report.formats[0].received.wire_bytes, 2 * 2 * kElems);
  EXPECT_TRUE(report.formats[1].factors);
  EXPECT_EQ(report.formats[1].received.raw_bytes, 2 * 8000);
  for (const Volume& volume : {report.received, report.sent}) {
    EXPECT_EQ(volume.raw_bytes, 2 * (4 * kElems + 8000));
    EXPECT_EQ(volume.wire_bytes, 2 * 2 * 2 * kElems);
  }
}

TEST(JobReportTest, RepeatedContributionIsCountedAsSuch) {
  TestJob job({1, 1});
  job.Register(kBucket, kElems, WireFormat::kFloat16);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(job.job().Contribute(0, Share(kBucket, 1, kFp16), Now()).ok());
  }
  EXPECT_EQ(job.job().Report(Now()).repeated_contributions, 1u);
}

class ShardReportTest : public ::testing::Test {
 protected:
  static JoinRequest Request(const std::string& job, uint32_t node, uint32_t num_nodes) {
    JoinRequest request;
    request.job = job;
    request.node = node;
    request.node_name = absl::StrCat("host", node);
    request.num_nodes = num_nodes;
    request.workers = 1;
    request.world_size = num_nodes;
    request.num_shards = 1;
    request.round_timeout = std::chrono::seconds(30);
    return request;
  }
  // Starts a job of one node.
  std::unique_ptr<Member> Begin(const std::string& job) {
    auto member = Join(job, 0, 1);
    EXPECT_TRUE(member.ok()) << member.status();
    const BucketLayout layout{DType::kFloat32, {{"w", {kElems}}}};
    EXPECT_TRUE(
        (*member)->Register({kBucket, layout, WireFormat::kFloat16, 0, 4 * kElems}, Now()).ok());
    return *std::move(member);
  }
  absl::StatusOr<std::unique_ptr<Member>> Join(const std::string& job, uint32_t node,
                                               uint32_t num_nodes) {
    return shard_.Join(Request(job, node, num_nodes), std::make_shared<ListSink>(), Now());
  }

  MetricRegistry registry_;
  Aggregator shard_{{.weight = 3}, registry_};
};

TEST_F(ShardReportTest, SumsAreThoseOfTheMetrics) {
  const auto a = Begin("a");
  const auto b = Begin("b");
  for (Member* const member : {a.get(), b.get()}) {
    ASSERT_TRUE(member->Contribute(Share(kBucket, 1, kFp16)).ok());
  }
  const ShardReport report = shard_.Report(Now());
  const auto counter = [&](const char* name) { return registry_.GetCounter(name, "").Value(); };
  EXPECT_EQ(report.weight, 3u);
  EXPECT_EQ(report.contributions, 2u);
  EXPECT_EQ(counter("thalweg_shard_contributions_total"), 2);
  EXPECT_EQ(report.rounds_completed, 2u);
  EXPECT_EQ(registry_.GetCounter("thalweg_shard_rounds_total", "", {{"outcome", "ok"}}).Value(), 2);
  EXPECT_EQ(report.received.wire_bytes, 2 * 2 * kElems);
  EXPECT_EQ(counter("thalweg_shard_received_bytes_total"), 2 * 2 * kElems);
  EXPECT_EQ(counter("thalweg_shard_received_raw_bytes_total"), 2 * 4 * kElems);
  EXPECT_EQ(report.sent.wire_bytes, counter("thalweg_shard_sent_bytes_total"));
  EXPECT_EQ(report.sent.raw_bytes, counter("thalweg_shard_sent_raw_bytes_total"));
  ASSERT_THAT(report.jobs, SizeIs(2));
  EXPECT_EQ(report.jobs[1].name, "b");
  EXPECT_EQ(report.jobs[1].rounds_completed, 1u);
}

TEST_F(ShardReportTest, FaultsOutliveTheirJobs) {
  Begin("lost")->Leave(absl::AbortedError("killed by SIGKILL"));
  const ShardReport report = shard_.Report(Now() + Millis(1));
  EXPECT_THAT(report.jobs, IsEmpty());
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].job, "lost");
  EXPECT_EQ(report.faults[0].code, absl::StatusCode::kAborted);
  EXPECT_THAT(report.faults[0].message, HasSubstr("node 0 (host0): killed by SIGKILL"));
  EXPECT_FALSE(report.faults[0].refused);
  EXPECT_GE(report.faults[0].ago, Millis(1));
  ASSERT_THAT(report.reasons, SizeIs(1));
  EXPECT_EQ(report.reasons[0].jobs_failed, 1u);
}

TEST_F(ShardReportTest, FailureSaysHowManyRoundsItCost) {
  TestJob job({1, 1});
  job.Register(kBucket, kElems, WireFormat::kFloat16);
  ASSERT_TRUE(job.job().Contribute(0, Share(kBucket, 1, kFp16), Now()).ok());
  job.job().Fail(absl::UnavailableError("gone"));
  const JobReport report = job.job().Report(Now());
  EXPECT_EQ(report.state, JobReport::State::kFailed);
  EXPECT_THAT(report.failure, HasSubstr("gone"));
  EXPECT_EQ(report.rounds_lost, 1u);
  EXPECT_EQ(report.open_rounds, 0u);
  EXPECT_FALSE(report.waiting);
}

TEST_F(ShardReportTest, RefusedNodeIsAFaultOfItsOwn) {
  const auto member = Begin("job");
  EXPECT_FALSE(Join("job", 0, 1).ok());    // node 0 has already joined
  EXPECT_FALSE(Join("other", 5, 2).ok());  // there is no node 5
  const ShardReport report = shard_.Report(Now());
  ASSERT_THAT(report.faults, SizeIs(2));
  EXPECT_TRUE(report.faults[0].refused);
  EXPECT_EQ(report.faults[0].job, "other");
  EXPECT_EQ(report.faults[1].code, absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(report.jobs, SizeIs(1));
}

TEST_F(ShardReportTest, NodesThatDoNotComeAreMissingAndOneFault) {
  EXPECT_FALSE(Join("half", 0, 2).ok());
  const ShardReport report = shard_.Report(Now());
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_FALSE(report.faults[0].refused);
  EXPECT_THAT(report.faults[0].message, HasSubstr("node 1 of 2 did not join"));
}

TEST(FaultLogTest, KeepsTheLatestAndCountsAll) {
  FaultLog log;
  const TimePoint start = Now();
  const size_t count = FaultLog::kKept + 7;
  for (size_t i = 0; i < count; ++i) {
    log.AddFailure(absl::StrCat("job", i), absl::AbortedError(std::string(5000, 'x')), 2, start);
  }
  ShardReport report;
  log.Report(start + Millis(4), &report);
  ASSERT_THAT(report.faults, SizeIs(FaultLog::kKept));
  EXPECT_EQ(report.faults[0].job, absl::StrCat("job", count - 1));
  EXPECT_EQ(report.faults[0].ago, Millis(4));
  EXPECT_LT(report.faults[0].message.size(), FaultLog::kMaxTextBytes + 8);
  ASSERT_THAT(report.reasons, SizeIs(1));
  EXPECT_EQ(report.reasons[0].jobs_failed, count);
  EXPECT_EQ(report.reasons[0].rounds_lost, 2 * count);
}

// This test is for ThreadSanitizer; it also checks that sums never decrease.
TEST_F(ShardReportTest, CanBeReadWhileRoundsGoOn) {
  constexpr uint64_t kRounds = 500;
  const auto member = Begin("job");
  std::atomic<bool> done = false;
  Thread reader("reader", [&] {
    uint64_t before = 0;
    while (!done) {
      const ShardReport report = shard_.Report(Now());
      ASSERT_THAT(report.jobs, SizeIs(1));
      ASSERT_GE(report.jobs[0].rounds_completed, before);
      before = report.jobs[0].rounds_completed;
    }
  });
  for (uint64_t round = 1; round <= kRounds; ++round) {
    EXPECT_TRUE(member->Contribute(Share(kBucket, round, kFp16)).ok());
  }
  done = true;
  reader.Join();
  EXPECT_EQ(shard_.Report(Now()).jobs[0].rounds_completed, kRounds);
}

}  // namespace
}  // namespace thalweg::job_report_test
