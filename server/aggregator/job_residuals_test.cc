// These tests read a shard's residuals and write them into another job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>
#include <vector>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_residuals_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr BucketId kPart{3, 1, 4};

class JobResidualsTest : public ::testing::TestWithParam<WireFormat> {
 protected:
  // Runs rounds `first` … `last` of both chunks, whose shares depend only on `seed` and the round.
  // Returns the results.
  // Each node's share is multiplied by the first node's loss scale; the nodes name `scales`.
  static std::vector<Bytes> Exchange(TestJob& job, uint64_t first, uint64_t last, uint64_t seed,
                                     std::array<double, 2> scales = {}, BucketId part = kPart) {
    const float factor = scales[0] == kUnknownLossScale ? 1 : static_cast<float>(scales[0]);
    for (uint64_t round = first; round <= last; ++round) {
      std::mt19937_64 random(seed + round);
      for (uint32_t chunk = 0; chunk < 2; ++chunk) {
        for (uint32_t node = 0; node < 2; ++node) {
          Floats share = RandomFloats(ElemsOf(chunk), 0, random);
          for (float& value : share) value *= factor;
          const ReferenceChunk encoded =
              GetParam() == WireFormat::kInt8 ? ReferenceInt8(share) : ReferenceOneBit(share);
          EXPECT_TRUE(job.Contribute(node, {part, chunk, round}, GetParam(), share.size(),
                                     encoded.bytes, scales[node])
                          .ok());
        }
      }
    }
    std::vector<Bytes> results;
    for (const RoundResult& result : job.sink(0).results)
      results.push_back(BytesOf(result.payload));
    job.sink(0).results.clear();
    return results;
  }

  static constexpr uint64_t kElems = 20'000;
  static uint64_t ElemsOf(uint32_t chunk) {
    const uint64_t chunk_elems = GetParam() == WireFormat::kInt8 ? 4096 : 16384;
    return std::min(chunk_elems, kElems - chunk * chunk_elems);
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, JobResidualsTest,
                         ::testing::Values(WireFormat::kInt8, WireFormat::kOneBit),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(JobResidualsTest, ResidualWrittenIntoAFreshJobContinuesBitForBit) {
  TestJob before({1, 1}), resumed({1, 1}), forgetful({1, 1});
  for (TestJob* job : {&before, &resumed, &forgetful}) job->Register(kPart, kElems, GetParam());
  Exchange(before, 1, 5, 100);
  for (uint32_t chunk = 0; chunk < 2; ++chunk) {
    // Every node may read.
    const auto residual = before.job().ReadResidual(1, kPart, chunk);
    ASSERT_TRUE(residual.ok()) << residual.status();
    ASSERT_EQ(residual->size(), ElemsOf(chunk));
    ASSERT_TRUE(resumed.job().WriteResidual(0, kPart, chunk, *residual).ok());
    EXPECT_EQ(resumed.job().ReadResidual(1, kPart, chunk).value(), *residual);
  }
  EXPECT_EQ(resumed.ResidualBytes(), 4.0 * (ElemsOf(0) + ElemsOf(1)));
  const std::vector<Bytes> expected = Exchange(before, 6, 8, 100);
  ASSERT_EQ(expected.size(), 6u);
  EXPECT_EQ(Exchange(resumed, 1, 3, 105), expected);
  EXPECT_NE(Exchange(forgetful, 1, 3, 105), expected);
}

TEST_P(JobResidualsTest, ResidualIsReadAndWrittenInTrueUnitsAndFollowsTheFirstNodesScale) {
  TestJob plain({1, 1}), scaled({1, 1}), resumed({1, 1});
  for (TestJob* job : {&plain, &scaled, &resumed}) job->Register(kPart, kElems, GetParam());
  Exchange(plain, 1, 5, 100);
  Exchange(scaled, 1, 3, 100, {1024, 4});
  Exchange(scaled, 4, 5, 100, {2048, 1024});
  for (uint32_t chunk = 0; chunk < 2; ++chunk) {
    const Floats residual = plain.job().ReadResidual(0, kPart, chunk).value();
    EXPECT_EQ(scaled.job().ReadResidual(0, kPart, chunk).value(), residual);
    ASSERT_TRUE(resumed.job().WriteResidual(0, kPart, chunk, residual).ok());
  }
  // Reading has changed nothing for the job that goes on.
  EXPECT_EQ(Exchange(scaled, 6, 8, 100, {2048, 2048}), Exchange(resumed, 1, 3, 105, {2048, 2048}));
  for (uint32_t chunk = 0; chunk < 2; ++chunk) {
    EXPECT_EQ(scaled.job().ReadResidual(0, kPart, chunk).value(),
              resumed.job().ReadResidual(0, kPart, chunk).value());
  }
}

TEST_P(JobResidualsTest, LossScaleThatIsNoneIsRefusedBeforeItReachesTheResidual) {
  for (const double scale : {-1.0, double{kNaN}, double{kInfinity}}) {
    TestJob job({1, 1});
    job.Register(kPart, kElems, GetParam());
    Exchange(job, 1, 1, 7);
    const Bytes bytes(MaxEncodedBytes(GetParam(), ElemsOf(0)));
    const absl::Status status =
        job.Contribute(0, {kPart, 0, 2}, GetParam(), ElemsOf(0), bytes, scale);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(
                    "expected a positive, finite loss scale, or 0 for none, got ", scale)));
  }
}

TEST_P(JobResidualsTest, NoScaleMakesResultsInfinite) {
  TestJob job({1, 1});
  job.Register(kPart, kElems, GetParam());
  uint64_t round = 0;
  for (const double scale : {1e300, 1e-300, 1e300, 1.0}) {
    ++round;
    const Floats share(ElemsOf(0), 1.25f);
    const ReferenceChunk encoded =
        GetParam() == WireFormat::kInt8 ? ReferenceInt8(share) : ReferenceOneBit(share);
    for (uint32_t node : {0u, 1u}) {
      ASSERT_TRUE(
          job.Contribute(node, {kPart, 0, round}, GetParam(), share.size(), encoded.bytes, scale)
              .ok());
    }
    EXPECT_EQ(job.sink(0).results.back().nonfinite_elems, 0u);
  }
}

TEST_P(JobResidualsTest, ThereIsNoneBeforeTheFirstRoundNorAfterThatOfTheNextLayout) {
  TestJob job({1, 1});
  job.Register(kPart, kElems, GetParam());
  EXPECT_EQ(job.job().ReadResidual(0, kPart, 0).value(), Floats());
  Exchange(job, 1, 1, 7);
  EXPECT_EQ(job.job().ReadResidual(0, kPart, 0)->size(), ElemsOf(0));
  constexpr BucketId kNext{kPart.index, kPart.generation + 1, kPart.part};
  job.Register(kNext, kElems, GetParam());
  EXPECT_EQ(job.job().ReadResidual(0, kNext, 0).value(), Floats());
  // Until then the first node may move it.
  EXPECT_EQ(job.job().ReadResidual(0, kPart, 0)->size(), ElemsOf(0));
  Exchange(job, 1, 1, 7, {}, kNext);
  EXPECT_EQ(job.job().ReadResidual(0, kPart, 0).value(), Floats());
  const absl::Status unknown = job.job().ReadResidual(0, {9, 0, kPart.part}, 0).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("job 'job'"));
}

TEST_P(JobResidualsTest, UnfitResidualsAreRefusedAndChangeNothing) {
  TestJob job({1, 1});
  job.Register(kPart, kElems, GetParam());
  job.Register({0, 0, 7}, kElems, WireFormat::kTopK);
  Exchange(job, 1, 1, 7);
  const Floats before = job.job().ReadResidual(0, kPart, 0).value();
  const auto refusal = [&](BucketId part, uint32_t chunk, const Floats& values) {
    const absl::Status status = job.job().WriteResidual(0, part, chunk, values);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  Floats values(before.size() + 1);
  EXPECT_THAT(
      refusal(kPart, 0, values),
      AllOf(HasSubstr("residual of chunk 0 of bucket 3 (layout 1, part 4)"),
            HasSubstr(absl::StrCat("expected ", before.size(), " values, got ", values.size()))));
  EXPECT_THAT(refusal(kPart, 0, {}), HasSubstr("got 0"));
  values.pop_back();
  values[17] = kNaN;
  EXPECT_THAT(refusal(kPart, 0, values), HasSubstr("finite values, got nan for element 17"));
  EXPECT_THAT(refusal(kPart, 99, Floats(1)), HasSubstr("got chunk 99"));
  EXPECT_THAT(refusal({0, 0, 7}, 0, Floats(16384)), HasSubstr("topk, which leaves no residual"));
  EXPECT_EQ(job.job().WriteResidual(0, {9, 0, 1}, 0, Floats(1)).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(job.job().ReadResidual(0, kPart, 0).value(), before);
  // The job continues.
  Exchange(job, 2, 2, 7);
  EXPECT_TRUE(job.sink(0).failures.empty());
}

TEST_P(JobResidualsTest, JobThatHasFailedSaysWhy) {
  TestJob job({1, 1});
  job.Register(kPart, kElems, GetParam());
  job.job().Fail(absl::AbortedError("enough"));
  const Floats values(ElemsOf(0));
  EXPECT_EQ(job.job().ReadResidual(0, kPart, 0).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(job.job().WriteResidual(0, kPart, 0, values).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(job.ResidualBytes(), 0);
}

}  // namespace
}  // namespace thalweg::job_residuals_test
