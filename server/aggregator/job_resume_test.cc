// These tests let the nodes of a job resume it, as after a restart of the shard.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "kernels/codec/lossy.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::job_resume_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr BucketId kBucket{2, 1, 0};
constexpr uint64_t kElems = 1500;  // two chunks of kMinChunkBytes

Bytes Values(float value, uint64_t elems) {
  const Floats floats(elems, value);
  Bytes bytes(elems * sizeof(float));
  std::memcpy(bytes.data(), floats.data(), bytes.size());
  return bytes;
}

uint64_t ElemsOf(uint32_t chunk) {
  return ChunkPlan::For(kElems, DType::kFloat32, WireFormat::kFloat32, kMinChunkBytes, 1)
      .Elems(chunk);
}

absl::Status Contribute(TestJob& job, uint32_t node, uint32_t chunk, uint64_t round, float value) {
  const uint64_t elems = ElemsOf(chunk);
  return job.Contribute(node, {kBucket, chunk, round}, WireFormat::kFloat32, elems,
                        Values(value, elems));
}

RoundResult Result(uint32_t chunk, uint64_t round, uint32_t workers, float value) {
  const uint64_t elems = ElemsOf(chunk);
  return {{kBucket, chunk, round},        1, WireFormat::kFloat32, elems, workers, 0,
          Split(Values(value, elems), {})};
}

double Count(TestJob& job, const char* name) { return job.registry().GetCounter(name, "").Value(); }

TEST(JobResumeTest, NodesGoOnAtTheirNextRound) {
  TestJob job({1, 1}, TestJob::kPlenty, {{{kBucket, {4, 9}}}, {{kBucket, {4, 9}}}});
  EXPECT_THAT(job.job().WantedFrom(0), IsEmpty());
  job.Register(kBucket, kElems, WireFormat::kFloat32);
  for (const uint32_t node : {0u, 1u}) {
    ASSERT_TRUE(Contribute(job, node, 0, 4, 100).ok());  // complete, so it is not summed again
    ASSERT_TRUE(Contribute(job, node, 0, 5, node == 0 ? 2 : 4).ok());
    ASSERT_TRUE(Contribute(job, node, 1, 10, 8).ok());
  }
  for (const uint32_t node : {0u, 1u}) {
    const auto& results = job.sink(node).results;
    ASSERT_EQ(results.size(), 2u);
    EXPECT_EQ(results[0].id, (RoundId{kBucket, 0, 5}));
    EXPECT_EQ(BytesOf(results[0].payload), Values(3, ElemsOf(0)));
    EXPECT_EQ(results[1].id, (RoundId{kBucket, 1, 10}));
  }
  EXPECT_EQ(Count(job, "thalweg_shard_resumed_jobs_total"), 1);
  EXPECT_EQ(Count(job, "thalweg_shard_supplied_results_total"), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(Contribute(job, 0, 0, 7, 1)));  // round 6 has not been
}

TEST(JobResumeTest, NodeThatLacksAResultGetsItInsteadOfAnotherSum) {
  // Nodes 0 and 2 have round 5 of chunk 0, whose result node 1 has lost.
  TestJob job({1, 1, 2}, TestJob::kPlenty,
              {{{kBucket, {5, 5}}}, {{kBucket, {4, 5}}}, {{kBucket, {5, 5}}}});
  EXPECT_THAT(job.job().WantedFrom(0), ElementsAre(BucketRounds{kBucket, {5}}));
  EXPECT_THAT(job.job().WantedFrom(2), IsEmpty());
  job.Register(kBucket, kElems, WireFormat::kFloat32);
  ASSERT_TRUE(Contribute(job, 0, 0, 6, 8).ok());
  ASSERT_TRUE(Contribute(job, 1, 0, 5, 100).ok());
  EXPECT_THAT(job.sink(1).results, IsEmpty());
  ASSERT_TRUE(job.job().Supply(0, Result(0, 5, 4, 7), Now()).ok());
  ASSERT_EQ(job.sink(1).results.size(), 1u);
  EXPECT_EQ(job.sink(1).results[0].id, (RoundId{kBucket, 0, 5}));
  EXPECT_EQ(BytesOf(job.sink(1).results[0].payload), Values(7, ElemsOf(0)));
  EXPECT_THAT(job.sink(0).results, IsEmpty());
  EXPECT_THAT(job.sink(2).results, IsEmpty());
  EXPECT_EQ(Count(job, "thalweg_shard_supplied_results_total"), 1);

  ASSERT_TRUE(Contribute(job, 1, 0, 6, 4).ok());
  ASSERT_TRUE(Contribute(job, 2, 0, 6, 2).ok());
  ASSERT_EQ(job.sink(0).results.size(), 1u);
  EXPECT_EQ(BytesOf(job.sink(0).results[0].payload), Values(4, ElemsOf(0)));  // (8 + 4 + 2·2) / 4
  EXPECT_THAT(job.sink(0).failures, IsEmpty());
}

TEST(JobResumeTest, ResultThatComesBeforeItIsAskedForIsKept) {
  TestJob job({1, 1}, TestJob::kPlenty, {{{kBucket, {4}}}, {{kBucket, {5}}}});
  job.Register(kBucket, kElems, WireFormat::kFloat32);
  ASSERT_TRUE(job.job().Supply(1, Result(0, 5, 2, 7), Now()).ok());
  EXPECT_THAT(job.sink(0).results, IsEmpty());
  ASSERT_TRUE(Contribute(job, 0, 0, 5, 1).ok());
  ASSERT_EQ(job.sink(0).results.size(), 1u);
  EXPECT_EQ(BytesOf(job.sink(0).results[0].payload), Values(7, ElemsOf(0)));
}

TEST(JobResumeTest, LastResultOfAnEarlierLayoutReachesTheNodeThatLacksIt) {
  const BucketId later{2, 2, 0};
  const BucketLayout layout{DType::kFloat32, {{"w", {kElems}}}};
  TestJob job({1, 1}, TestJob::kPlenty, {{{kBucket, {5, 5}}}, {{kBucket, {5, 4}}}});
  ASSERT_TRUE(job.job().RegisterBucket(0, {later, layout}).ok());
  ASSERT_TRUE(job.job().RegisterBucket(1, {kBucket, layout}).ok());
  ASSERT_TRUE(Contribute(job, 1, 1, 5, 1).ok());
  ASSERT_TRUE(job.job().Supply(0, Result(1, 5, 2, 7), Now()).ok());
  EXPECT_EQ(job.sink(1).results.size(), 1u);
  ASSERT_TRUE(job.job().RegisterBucket(1, {later, layout}).ok());
  EXPECT_THAT(job.sink(1).failures, IsEmpty());
}

TEST(JobResumeTest, LastResultThatWasAPullReachesTheNodeThatLacksIt) {
  TestJob job({1, 1}, TestJob::kPlenty, {{{kBucket, {5}}}, {{kBucket, {4}}}});
  job.Register(kBucket, kElems, WireFormat::kFloat32);
  ASSERT_TRUE(Contribute(job, 1, 0, 5, 1).ok());
  ASSERT_TRUE(job.job().Supply(0, Result(0, 5, 0, 7), Now()).ok());
  ASSERT_EQ(job.sink(1).results.size(), 1u);
  EXPECT_EQ(job.sink(1).results[0].workers, 0u);
}

TEST(JobResumeTest, ResultThatCannotBeTheJobsFailsIt) {
  for (const bool wrong_workers : {false, true}) {
    TestJob job({1, 1}, TestJob::kPlenty, {{{kBucket, {5}}}, {{kBucket, {4}}}});
    RoundResult result = Result(0, wrong_workers ? 5 : 6, wrong_workers ? 3 : 2, 7);
    EXPECT_FALSE(job.job().Supply(0, result, Now()).ok());
    ASSERT_EQ(job.sink(1).failures.size(), 1u);
    EXPECT_THAT(std::string(job.sink(1).failures[0].message()), HasSubstr("job 'job': node 0"));
  }
}

TEST(JobResumeTest, ResidualsBeginAtZeroAgainWhichIsCounted) {
  const WireFormat wire = WireFormat::kOneBit;
  const BucketId fresh{3, 0, 0};
  constexpr uint64_t kFew = 64;
  TestJob job({1}, TestJob::kPlenty, {{{kBucket, {4}}}});
  job.Register(kBucket, kFew, wire);
  job.Register(fresh, kFew, wire);
  std::mt19937_64 random(3);
  const Floats x = RandomFloats(kFew, 900, random);
  const ReferenceChunk sent = ReferenceOneBit(x);
  ASSERT_TRUE(job.Contribute(0, {kBucket, 0, 5}, wire, kFew, sent.bytes).ok());
  ASSERT_TRUE(job.Contribute(0, {fresh, 0, 1}, wire, kFew, sent.bytes).ok());
  ASSERT_EQ(job.sink(0).results.size(), 2u);
  EXPECT_EQ(BytesOf(job.sink(0).results[0].payload), ReferenceOneBit(sent.decoded).bytes);
  EXPECT_EQ(Count(job, "thalweg_shard_lost_residuals_total"), 1);
}

// A job to which nodes come one by one.
class JobGathersAgainTest : public ::testing::Test {
 protected:
  static JoinRequest Request(uint32_t node, std::optional<std::vector<BucketRounds>> resume) {
    JoinRequest request = RequestOf(node, 2);
    request.chunk_bytes = kMinChunkBytes;
    request.window_chunks = 4;
    request.round_timeout = std::chrono::seconds(30);
    request.resume = std::move(resume);
    return request;
  }
  absl::Status Add(Job& job, const JoinRequest& request) {
    return job.AddMember(request, std::make_shared<ListSink>(), Now());
  }

  MetricRegistry registry_;
  ShardMetrics metrics_{registry_};
  MemoryBudget memory_{1 << 20, metrics_.memory_reserved_bytes};
  FaultLog faults_;
};

TEST_F(JobGathersAgainTest, NodeThatBeginsTheJobIsNotMixedWithThoseThatResumeIt) {
  for (const bool first_resumes : {false, true}) {
    const auto rounds = [&](bool resumes) {
      return resumes ? std::optional(std::vector<BucketRounds>()) : std::nullopt;
    };
    const JoinRequest first = Request(0, rounds(first_resumes));
    Job job(first, 8, memory_, metrics_, faults_);
    ASSERT_TRUE(Add(job, first).ok());
    const absl::Status refused = Add(job, Request(1, rounds(!first_resumes)));
    EXPECT_TRUE(absl::IsInvalidArgument(refused));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("node 1 (host1) says the job's beginning "
                                                          "is "));
    EXPECT_EQ(TermsOf(job).status(), refused);
  }
}

TEST_F(JobGathersAgainTest, OtherTermsAreRefused) {
  const JoinRequest first = Request(0, std::vector<BucketRounds>());
  Job job(first, 8, memory_, metrics_, faults_);
  ASSERT_TRUE(Add(job, first).ok());
  JoinRequest second = Request(1, std::vector<BucketRounds>());
  second.window_chunks = 3;
  EXPECT_THAT(std::string(Add(job, second).message()), HasSubstr("the window in chunks is 3"));
}

TEST_F(JobGathersAgainTest, NodesMoreThanOneRoundApartHearThatTheShardHasLostWeights) {
  const JoinRequest first = Request(0, {{{kBucket, {6}}}});
  Job job(first, 8, memory_, metrics_, faults_);
  ASSERT_TRUE(Add(job, first).ok());
  ASSERT_TRUE(Add(job, Request(1, {{{kBucket, {4}}}})).ok());
  const absl::Status failed = TermsOf(job).status();
  EXPECT_TRUE(absl::IsDataLoss(failed));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("node 0 resumes with round 6 of chunk 0"));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("has lost the weights that it kept"));
}

// Node 1 lacks `missing` results, and their windows have 4 chunks: it has been restarted, and knows
// of whole buckets alone.
TEST_F(JobGathersAgainTest, ResultsThatNodesSupplyAreReservedAlsoBeyondTheirWindows) {
  for (const size_t missing : {4u, 8u, 50u}) {
    const JoinRequest first = Request(0, {{{kBucket, std::vector<uint64_t>(missing, 2)}}});
    Job job(first, 8, memory_, metrics_, faults_);
    ASSERT_TRUE(Add(job, first).ok());
    ASSERT_TRUE(Add(job, Request(1, {{{kBucket, std::vector<uint64_t>(missing, 1)}}})).ok());
    const absl::Status begun = TermsOf(job).status();
    ASSERT_TRUE(begun.ok()) << begun;
    // The windows of two nodes, one of results, and what is supplied, in chunks.
    EXPECT_GE(memory_.reserved(), (3 * 4 + 2 * missing) * kMinChunkBytes);
  }
}

TEST_F(JobGathersAgainTest, ResultWithAsManyIndicesAsAChunkCanHaveIsTaken) {
  const uint64_t elems_of_chunk = FindLossy(WireFormat::kTopK)->chunk_elems;
  MemoryBudget memory(8 << 20, metrics_.memory_reserved_bytes);
  for (const bool too_long : {false, true}) {
    JoinRequest first = Request(0, {{{kBucket, {2}}}});
    JoinRequest second = Request(1, {{{kBucket, {1}}}});
    for (JoinRequest* request : {&first, &second}) {
      request->codec = CodecPolicy::Parse("topk:ratio=0.1").value();
    }
    Job job(first, 8, memory, metrics_, faults_);
    ASSERT_TRUE(Add(job, first).ok());
    ASSERT_TRUE(Add(job, second).ok());
    const auto terms = TermsOf(job);
    ASSERT_TRUE(terms.ok()) << terms.status();
    RoundResult result;
    result.id = {kBucket, 0, 2};
    result.epoch = terms->epoch;
    result.wire = WireFormat::kTopK;
    result.elems = too_long ? elems_of_chunk + 1024 : elems_of_chunk;
    result.workers = 2;
    const std::vector<std::byte> bytes(MaxEncodedBytes(result.wire, result.elems));
    result.payload = Payload(bytes, nullptr);
    EXPECT_GE(memory.reserved(), MaxEncodedBytes(WireFormat::kTopK, elems_of_chunk));
    EXPECT_EQ(job.Supply(0, result, Now()).ok(), !too_long);
  }
}

TEST_F(JobGathersAgainTest, RoundsAreReservedAsMemory) {
  // Within the limit of their number, and beyond that of the memory.
  const JoinRequest first = Request(0, {{{kBucket, std::vector<uint64_t>(20'000, 1)}}});
  Job job(first, 8, memory_, metrics_, faults_);
  const absl::Status refused = Add(job, first);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(memory_.reserved(), 0u);
}

}  // namespace
}  // namespace thalweg::job_resume_test
