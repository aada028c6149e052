// These tests run jobs whose nodes send int8, onebit and topk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "kernels/codec/lossy.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::lossy_job_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr BucketId kPart{3, 0, 1};

// A Node encodes with a residual of its own, as the sidecar does.
class Node {
 public:
  Node(WireFormat wire, uint64_t elems) : wire_(wire), residual_(elems) {}

  Bytes Encode(const Floats& values) {
    Bytes bytes(MaxEncodedBytes(wire_, values.size()));
    const Encoded encoded =
        EncodeLossy(wire_, 0.05, values.data(), residual_.data(), values.size(), bytes.data());
    bytes.resize(encoded.bytes);
    return bytes;
  }

 private:
  WireFormat wire_;
  Floats residual_;
};

class LossyJobTest : public ::testing::TestWithParam<WireFormat> {
 protected:
  static Floats Decode(const Payload& payload, uint64_t elems) {
    Floats decoded(elems);
    EXPECT_TRUE(DecodeLossy(payload, GetParam(), DType::kFloat32, elems, decoded.data()).ok());
    return decoded;
  }
  // Returns what the shard must send for a mean; updates `residual` to what it must keep.
  static Bytes ReferenceResult(const Floats& mean, Floats& residual) {
    const Floats x = Sum(mean, residual);
    const ReferenceChunk chunk =
        GetParam() == WireFormat::kInt8 ? ReferenceInt8(x) : ReferenceOneBit(x);
    residual = ResidualOf(x, chunk.decoded, residual);
    return chunk.bytes;
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, LossyJobTest, ::testing::ValuesIn(kLossyFormats),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(LossyJobTest, EveryNodeGetsTheDocumentedResultOfEveryChunk) {
  const uint64_t elems_of_bucket = 20'000 + FindLossy(GetParam())->chunk_elems;
  TestJob job({1, 2, 1});
  job.Register(kPart, elems_of_bucket, GetParam());
  const ChunkPlan plan =
      ChunkPlan::For(elems_of_bucket, DType::kFloat32, GetParam(), kMinChunkBytes, 1);
  ASSERT_GT(plan.Count(), 1u);
  std::mt19937_64 random(1);
  std::vector<std::vector<Node>> nodes(3);
  std::vector<Floats> residuals;  // by chunk
  for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
    for (auto& node : nodes) node.emplace_back(GetParam(), plan.Elems(chunk));
    residuals.emplace_back(plan.Elems(chunk));
  }
  size_t count = 0;
  for (uint64_t round = 1; round <= 4; ++round) {
    for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk, ++count) {
      const uint64_t elems = plan.Elems(chunk);
      std::vector<Floats> decoded(3);
      for (uint32_t node : {2u, 0u, 1u}) {
        const Bytes bytes = nodes[node][chunk].Encode(RandomFloats(elems, 900, random));
        decoded[node] = Decode(Split(bytes, {}), elems);
        ASSERT_TRUE(job.Contribute(node, {kPart, chunk, round}, GetParam(), elems, bytes).ok());
      }
      const Floats mean = ReferenceMean(decoded, job.workers());
      const RoundResult& result = job.sink(0).results[count];
      ASSERT_EQ(result.wire, GetParam());
      ASSERT_EQ(result.elems, elems);
      ASSERT_EQ(result.workers, 4u);
      ASSERT_EQ(result.nonfinite_elems, CountNonFinite(mean));
      if (GetParam() == WireFormat::kTopK) {
        const Floats zeros(elems);  // the addition turns −0 into 0; absent elements are 0
        ASSERT_EQ(BitsOf(Sum(Decode(result.payload, elems), zeros)), BitsOf(Sum(mean, zeros)));
      } else {
        ASSERT_EQ(BytesOf(result.payload), ReferenceResult(mean, residuals[chunk]));
      }
      for (uint32_t node : {1u, 2u}) {
        ASSERT_EQ(job.sink(node).results[count].payload.owner, result.payload.owner);
      }
    }
  }
  const bool fed_back = GetParam() != WireFormat::kTopK;
  EXPECT_EQ(job.ResidualBytes(), fed_back ? elems_of_bucket * 4 : 0);
  EXPECT_EQ(job.HeldBytes(), 0);
}

TEST_P(LossyJobTest, NonFiniteGradientsReachAllNodesAreCountedAndLeaveNoTrace) {
  constexpr uint64_t kElems = 1500;
  TestJob job({1, 1});
  job.Register(kPart, kElems, GetParam());
  const auto contribute = [&](uint64_t round, const Floats& a, const Floats& b) {
    EXPECT_TRUE(
        job.Contribute(0, {kPart, 0, round}, GetParam(), kElems, Node(GetParam(), kElems).Encode(a))
            .ok());
    EXPECT_TRUE(
        job.Contribute(1, {kPart, 0, round}, GetParam(), kElems, Node(GetParam(), kElems).Encode(b))
            .ok());
    return Decode(job.sink(1).results.back().payload, kElems);
  };
  const Floats good(kElems, 1);
  Floats bad = good;
  bad[1100] = kInfinity;
  const Floats got = contribute(1, good, bad);
  // onebit sends whole blocks: the second one has 476 elements.
  if (GetParam() == WireFormat::kOneBit) {
    EXPECT_TRUE(std::isnan(got[1100]) && std::isnan(got[1024]) && std::isnan(got[1499]));
    EXPECT_EQ(job.NonFinite(), 476);
  } else {
    EXPECT_EQ(got[1100], kInfinity);
    EXPECT_EQ(job.NonFinite(), 1);
  }
  EXPECT_EQ(job.sink(1).results.back().nonfinite_elems, job.NonFinite());
  EXPECT_TRUE(std::isfinite(got[1023]));
  EXPECT_EQ(CountNonFinite(contribute(2, good, good)), 0u);
  EXPECT_EQ(job.sink(0).results.back().nonfinite_elems, 0u);
}

TEST_P(LossyJobTest, PayloadOfTheWrongSizeFailsTheJobWithTheReason) {
  TestJob job({1, 1});
  job.Register(kPart, 600, GetParam());
  Bytes bytes(MaxEncodedBytes(GetParam(), 600) + 1);
  const absl::Status status = job.Contribute(1, {kPart, 0, 1}, GetParam(), 600, bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("chunk 0 of bucket 3 (part 1)"), HasSubstr("expected 600 elements"),
                    HasSubstr(absl::StrCat(bytes.size() - 1, " bytes")),
                    HasSubstr(absl::StrCat(bytes.size(), " bytes"))));
  ASSERT_EQ(job.sink(0).failures.size(), 1u);
  EXPECT_EQ(job.sink(0).failures[0], status);
  EXPECT_EQ(job.HeldBytes(), 0);
  EXPECT_EQ(job.ResidualBytes(), 0);
}

TEST_P(LossyJobTest, MutatedPayloadsAreFoldedOrRefusedWithTheContributionsNumber) {
  std::mt19937_64 random(5);
  constexpr uint64_t kElems = 300;
  const Bytes good = Node(GetParam(), kElems).Encode(RandomFloats(kElems, 0, random));
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    Bytes bad = good;
    bad[random() % bad.size()] = static_cast<std::byte>(random());
    TestJob job({1, 1});
    job.Register(kPart, kElems, GetParam());
    ASSERT_TRUE(job.Contribute(0, {kPart, 0, 1}, GetParam(), kElems, good).ok());
    const absl::Status status = job.Contribute(1, {kPart, 0, 1}, GetParam(), kElems, bad);
    if (status.ok()) {
      ASSERT_EQ(job.sink(0).results.size(), 1u);
      continue;
    }
    ++refused;
    ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    ASSERT_THAT(std::string(status.message()),
                HasSubstr("job 'job': bucket 3 (part 1) round 1 chunk 0: contribution 1: "));
    ASSERT_TRUE(job.sink(0).results.empty());
    ASSERT_EQ(job.sink(0).failures.size(), 1u);
    ASSERT_EQ(job.ResidualBytes(), 0);
  }
  // int8 and onebit accept any bytes; gaps of topk may lead out of the chunk.
  EXPECT_EQ(refused > 0, GetParam() == WireFormat::kTopK);
}

TEST_P(LossyJobTest, ResidualsGoWithTheLayoutAndWithTheJob) {
  const bool fed_back = GetParam() != WireFormat::kTopK;
  const auto one_round = [](TestJob& job, BucketId part) {
    const Bytes bytes = Node(GetParam(), 600).Encode(Floats(600, 1));
    EXPECT_TRUE(job.Contribute(0, {part, 0, 1}, GetParam(), 600, bytes).ok());
  };
  TestJob job({1});
  job.Register(kPart, 600, GetParam());
  job.Register({4, 0, 1}, 600, GetParam());
  EXPECT_EQ(job.ResidualBytes(), 0);
  one_round(job, kPart);
  one_round(job, {4, 0, 1});
  EXPECT_EQ(job.ResidualBytes(), fed_back ? 4800 : 0);
  // They stay until the first round of the next layout, whichever part of the bucket that has.
  constexpr BucketId kNext{3, 1, 0};
  job.Register(kNext, 600, WireFormat::kFloat32);
  EXPECT_EQ(job.ResidualBytes(), fed_back ? 4800 : 0);
  EXPECT_TRUE(job.Contribute(0, {kNext, 0, 1}, WireFormat::kFloat32, 600, Bytes(2400)).ok());
  EXPECT_EQ(job.ResidualBytes(), fed_back ? 2400 : 0);
  job.job().RemoveMember(0, absl::OkStatus());
  EXPECT_EQ(job.ResidualBytes(), 0);

  TestJob failing({1});
  failing.Register(kPart, 600, GetParam());
  one_round(failing, kPart);
  EXPECT_EQ(failing.ResidualBytes(), fed_back ? 2400 : 0);
  failing.job().Fail(absl::AbortedError("enough"));
  EXPECT_EQ(failing.ResidualBytes(), 0);
}

TEST(PartWindowTest, EveryPartThatIsInUseAddsAWindow) {
  TestJob job({1, 1});  // a window of 64 chunks
  const auto fill = [&](BucketId part, uint32_t count) {
    for (uint32_t chunk = 0; chunk < count; ++chunk) {
      const absl::Status status =
          job.Contribute(0, {part, chunk, 1}, WireFormat::kFloat32, 1024, Bytes(4096));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  job.Register({0, 0, 0}, 1024 * 100, WireFormat::kFloat32);
  job.Register({0, 0, kMaxParts - 1}, 1024 * 100, WireFormat::kFloat32);
  EXPECT_TRUE(fill({0, 0, 0}, 64).ok());
  EXPECT_TRUE(fill({0, 0, kMaxParts - 1}, 64).ok());
  const absl::Status full =
      job.Contribute(0, {{0, 0, 0}, 64, 1}, WireFormat::kFloat32, 1024, Bytes(4096));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("window of 128 chunks"));
}

}  // namespace
}  // namespace thalweg::lossy_job_test
