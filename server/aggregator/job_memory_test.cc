// These tests compare what a job reserves with what it can come to hold.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_memory_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr BucketId kBucket{0, 0};
// Two nodes' windows of TestJob, and one window of results.
constexpr uint64_t kWindows = 3 * 64 * uint64_t{kMinChunkBytes};
// A bucket of one tensor has a layout of less than this.
constexpr uint64_t kLayout = 1024;

// Returns what the job has reserved beside what it takes by itself; 0 also if it has nothing.
double Reserved(TestJob& job) {
  const double all = job.Metric("thalweg_shard_memory_reserved_bytes");
  return all == 0 ? 0 : all - static_cast<double>(OwnBytes(job.workers().size()));
}

BucketAnnouncement Announce(BucketId id, uint64_t elems, WireFormat wire) {
  return {id, {DType::kFloat32, {{"w", {static_cast<int64_t>(elems)}}}}, wire, 0, 0};
}

TEST(JobMemoryTest, WindowsAreReservedWhenTheLastNodeJoinsAndReturnedWhenTheJobEnds) {
  TestJob failed({1, 1}), left({1, 1});
  for (TestJob* job : {&failed, &left}) {
    EXPECT_EQ(Reserved(*job), kWindows);
    EXPECT_EQ(job->job().Report(Now()).memory_reserved_bytes, kWindows + OwnBytes(2));
  }
  failed.job().Fail(absl::UnavailableError("gone"));
  EXPECT_EQ(Reserved(failed), 0);
  left.job().RemoveMember(0, absl::OkStatus());
  EXPECT_EQ(Reserved(left), kWindows);
  left.job().RemoveMember(1, absl::OkStatus());
  EXPECT_EQ(Reserved(left), 0);
}

TEST(JobMemoryTest, StatesThatWentWithTheirJobReserveNothingAgain) {
  JoinRequest first;
  first.num_nodes = first.num_shards = 1;
  first.chunk_bytes = kMinChunkBytes;
  MetricRegistry registry;
  ShardMetrics metrics(registry);
  MemoryBudget budget(TestJob::kPlenty, metrics.memory_reserved_bytes);
  const Members members(first);
  JobRounds rounds(first, members, /*keeps_snapshots=*/false);
  const JobPlan plan(first, 64);
  const Letters letters(1);
  JobMemory memory(first, {plan, rounds, letters}, budget, metrics);
  ASSERT_TRUE(rounds.Register(0, Announce(kBucket, 8, WireFormat::kInt8)).ok());
  rounds.StateOf(kBucket, 0, 8);
  ASSERT_TRUE(memory.ReserveStates().ok());
  EXPECT_GT(memory.reserved_bytes(), 0u);
  rounds.Release();
  memory.End();
  ASSERT_TRUE(memory.ReserveStates().ok());
  EXPECT_EQ(memory.reserved_bytes(), 0u);
}

TEST(JobMemoryTest, EachPartInUseHasAWindow) {
  TestJob job({1, 1});
  job.Register(kBucket, 8, WireFormat::kFloat32);
  job.Register({0, 0, 1}, 8, WireFormat::kFloat32);
  EXPECT_GT(Reserved(job), 2 * kWindows);
  EXPECT_LE(Reserved(job), 2 * kWindows + 2 * kLayout);
}

TEST(JobMemoryTest, ResidualsAreReservedWithTheirLayoutAndReturnedWithIt) {
  constexpr uint64_t kElems = 100'000;
  TestJob job({1, 1});
  job.Register({0, 0}, kElems, WireFormat::kInt8);
  EXPECT_GT(Reserved(job), kWindows + kElems * sizeof(float));
  EXPECT_LE(Reserved(job), kWindows + kElems * sizeof(float) + kLayout);
  EXPECT_EQ(job.ResidualBytes(), 0);  // nothing has been left out yet
  job.Register({0, 1}, 8, WireFormat::kInt8);
  EXPECT_LE(Reserved(job), kWindows + 8 * sizeof(float) + kLayout);
}

TEST(JobMemoryTest, ResidualsBeyondTheLimitFailTheJobWithTheNumbers) {
  constexpr uint64_t kElems = 100'000;
  constexpr uint64_t kLimit = kWindows + kElems * sizeof(float);  // lacks room for the layout
  TestJob job({1, 1}, kLimit);
  const absl::Status refused =
      job.job().RegisterBucket(0, Announce(kBucket, kElems, WireFormat::kOneBit));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(
          HasSubstr("job 'job'"), HasSubstr("aggregator shard 0"),
          HasSubstr(absl::StrCat(kLimit + OwnBytes(2), " of the limit of ", kLimit + OwnBytes(2))),
          HasSubstr("400000 for residuals and weights"), HasSubstr("THALWEG_MEMORY_LIMIT")));
  ASSERT_EQ(job.sink(1).failures.size(), 1u);
  EXPECT_EQ(job.sink(1).failures[0], refused);
  EXPECT_EQ(Reserved(job), 0);
}

TEST(JobMemoryTest, ResultsThatAreKeptForStreamsAreReserved) {
  TestJob job({1, 1}, kWindows + 15 * kWindows / 3 + kLayout);
  job.Register(kBucket, 8, WireFormat::kFloat32);
  job.sink(1).kept.streams = 16;
  const Bytes gradient(8 * sizeof(float));
  ASSERT_TRUE(job.Contribute(1, {kBucket, 0, 1}, WireFormat::kFloat32, 8, gradient).ok());
  EXPECT_GE(Reserved(job), kWindows + 15 * kWindows / 3);  // a window of results for each stream

  TestJob small({1, 1}, kWindows + kLayout);
  small.Register(kBucket, 8, WireFormat::kFloat32);
  small.sink(1).kept.streams = 2;
  const absl::Status refused =
      small.Contribute(1, {kBucket, 0, 1}, WireFormat::kFloat32, 8, gradient);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("results on 2 streams"));
  EXPECT_EQ(Reserved(small), 0);
}

TEST(JobMemoryTest, NodeThatAcknowledgesLessThanItsWindowsFailsTheJob) {
  TestJob job({1, 1});
  job.Register(kBucket, 8, WireFormat::kFloat32);
  const Bytes gradient(8 * sizeof(float));
  job.sink(1).kept.results = 63;
  ASSERT_TRUE(job.Contribute(1, {kBucket, 0, 1}, WireFormat::kFloat32, 8, gradient).ok());
  job.sink(1).kept.results = 64;
  const absl::Status refused =
      job.Contribute(1, {kBucket, 0, 2}, WireFormat::kFloat32, 8, gradient);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("node 1 (host1) has acknowledged none of the last 64 results"),
                    HasSubstr("all but fewer than its windows of 64 chunks")));
}

TEST(JobMemoryTest, JobWhoseResidualsFitGoesOn) {
  constexpr uint64_t kElems = 100'000;
  TestJob job({1, 1}, kWindows + kElems * sizeof(float) + kLayout);
  EXPECT_TRUE(job.job().RegisterBucket(0, Announce(kBucket, kElems, WireFormat::kOneBit)).ok());
}

// The last tests need a job that TestJob does not make.
JoinRequest Request(uint32_t num_nodes, uint32_t num_shards) {
  JoinRequest request;
  request.job = "big";
  request.num_nodes = num_nodes;
  request.world_size = num_nodes;
  request.workers = 1;
  request.num_shards = num_shards;
  request.chunk_bytes = kMinChunkBytes;
  request.window_chunks = 64;
  request.round_timeout = std::chrono::seconds(30);
  return request;
}

TEST(JobMemoryTest, WindowsBeyondTheLimitAreToldToAllNodes) {
  MetricRegistry registry;
  ShardMetrics metrics(registry);
  FaultLog faults;
  JoinRequest request = Request(2, 1);
  const uint64_t needed = kWindows + JobMemory::OwnBytes(request);
  MemoryBudget memory(needed - 1, metrics.memory_reserved_bytes);
  Job job(request, 64, memory, metrics, faults);
  for (uint32_t node = 0; node < 2; ++node) {
    request.node = node;
    ASSERT_TRUE(job.AddMember(request, std::make_shared<ListSink>(), Now()).ok());
  }
  const absl::Status refused = TermsOf(job).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("job 'big'"), HasSubstr(absl::StrCat("needs ", needed, " bytes")),
                    HasSubstr(absl::StrCat(needed - 1, " of the limit of ", needed - 1)),
                    HasSubstr("2 nodes with windows of 64 chunks of 4096 bytes and results "
                              "on 1 stream")));
  EXPECT_EQ(memory.reserved(), 0u);
  EXPECT_EQ(TermsOf(job).status(), refused);
}

TEST(JobMemoryTest, JobThatGathersReservesWhatItClaims) {
  MetricRegistry registry;
  ShardMetrics metrics(registry);
  FaultLog faults;
  const JoinRequest large = Request(1024, 8192), small = Request(2, 1);
  EXPECT_GT(JobMemory::OwnBytes(large),
            JobMemory::OwnBytes(small) + 1022 * kMaxNameBytes + 8191 * 64);
  MemoryBudget memory(JobMemory::OwnBytes(large), metrics.memory_reserved_bytes);
  Job first(large, 64, memory, metrics, faults), second(small, 64, memory, metrics, faults);
  ASSERT_TRUE(first.AddMember(large, std::make_shared<ListSink>(), Now()).ok());
  EXPECT_EQ(memory.reserved(), memory.limit());
  const absl::Status refused = second.AddMember(small, std::make_shared<ListSink>(), Now());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("for itself"));
  first.RemoveMember(0, absl::OkStatus());
  EXPECT_EQ(memory.reserved(), 0u);
}

TEST(JobMemoryTest, ShardWithMoreThanAnEqualPartReservesMoreUntilTheLimit) {
  constexpr uint64_t kElems = 100'000;
  constexpr uint64_t kOwnWindows = 2 * 64 * uint64_t{kMinChunkBytes};  // of one node, and results
  const JoinRequest request = Request(1, 2);
  const uint64_t own = JobMemory::OwnBytes(request);
  const uint64_t limit = own + kOwnWindows + kElems * sizeof(float) * 3 / 4;
  MetricRegistry registry;
  ShardMetrics metrics(registry);
  MemoryBudget memory(limit, metrics.memory_reserved_bytes);
  FaultLog faults;
  Job job(request, 64, memory, metrics, faults);
  ASSERT_TRUE(job.AddMember(request, std::make_shared<ListSink>(), Now()).ok());
  ASSERT_TRUE(job.RegisterBucket(0, Announce(kBucket, kElems, WireFormat::kInt8)).ok());
  const uint64_t equal_part = memory.reserved();
  EXPECT_LE(equal_part, own + kOwnWindows + kElems * sizeof(float) / 2 + kLayout);

  const ChunkPlan plan =
      ChunkPlan::For(kElems, DType::kFloat32, WireFormat::kInt8, kMinChunkBytes, 2);
  absl::Status status;
  uint64_t written = 0;
  for (uint32_t chunk = 0; chunk < plan.Count() && status.ok(); ++chunk) {
    status = job.WriteResidual(0, kBucket, chunk, std::vector<float>(plan.Elems(chunk)));
    if (status.ok()) written += plan.Elems(chunk);
    EXPECT_LE(memory.reserved(), limit);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GT(written, kElems / 2);
  EXPECT_LT(written, kElems * 3 / 4);
  EXPECT_EQ(memory.reserved(), 0u);  // the job has failed
}

}  // namespace
}  // namespace thalweg::job_memory_test
