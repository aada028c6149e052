#include "server/sidecar/codec/part.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/base/protocol.h"

namespace thalweg::part_test {
namespace {

class PartTest : public ::testing::Test {
 protected:
  RoundResult Result(uint32_t chunk, uint64_t round) const {
    RoundResult r;
    r.id = {part_.bucket.id, chunk, round};
    r.wire = WireFormat::kFloat16;
    r.elems = part_.plan.Elems(chunk);
    r.workers = 2;
    r.nonfinite_elems = 1;
    const auto bytes = std::make_shared<std::vector<std::byte>>(2 * r.elems);
    r.payload = Payload(*bytes, bytes);
    return r;
  }

  // The part has three chunks of 1024 float32.
  Part part_{
      {3, 1, 2}, {DType::kFloat32, {{"w", {2500}}}}, WireFormat::kFloat16, kMinChunkBytes, 1};
};

TEST_F(PartTest, RoundIsOverWhenAllChunksHaveComeInAnyOrder) {
  part_.BeginRound();
  for (uint32_t chunk : {2u, 0u, 1u}) {
    ASSERT_TRUE(part_.Claim(Result(chunk, 1)).ok());
    EXPECT_EQ(part_.FinishChunk(Result(chunk, 1)), chunk == 1);
  }
  EXPECT_FALSE(part_.in_flight);
  EXPECT_EQ(part_.workers, 2u);
  EXPECT_EQ(part_.nonfinite_elems, 3u);
  part_.BeginRound();
  EXPECT_TRUE(part_.Claim(Result(0, 2)).ok());
}

TEST_F(PartTest, ResultThatDoesNotBelongToTheRoundIsRefused) {
  EXPECT_FALSE(part_.Claim(Result(0, 1)).ok()) << "nothing is in flight";
  part_.BeginRound();
  EXPECT_FALSE(part_.Claim(Result(0, 2)).ok());
  RoundResult wrong = Result(0, 1);
  wrong.id.chunk = 3;
  EXPECT_FALSE(part_.Claim(wrong).ok());
  wrong = Result(0, 1);
  wrong.wire = WireFormat::kFloat32;
  EXPECT_FALSE(part_.Claim(wrong).ok());
  wrong = Result(0, 1);
  wrong.elems -= 1;
  EXPECT_FALSE(part_.Claim(wrong).ok());
  wrong = Result(0, 1);
  wrong.payload = Payload();
  EXPECT_FALSE(part_.Claim(wrong).ok()) << "a receipt";
  ASSERT_TRUE(part_.Claim(Result(0, 1)).ok());
  EXPECT_EQ(part_.Claim(Result(0, 1)).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace thalweg::part_test
