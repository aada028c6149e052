#include "server/sidecar/node_bucket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "core/base/protocol.h"
#include "server/sidecar/device/cpu_device.h"

namespace thalweg {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr TimePoint kStart{};
constexpr Duration kSecond = std::chrono::seconds(1);
constexpr int64_t kElems = 2500;  // three chunks of 1024 float32

CpuDevice device;
const BucketTerms kTerms{.codec = {{.wire = DType::kFloat16}, {}},
                         .chunk_bytes = kMinChunkBytes,
                         .local_size = 2,
                         .device = &device};

class NodeBucketTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const BucketLayout layout{DType::kFloat32, {{"w", {kElems}}}};
    bucket_ = *NodeBucket::Create({{0, 0}, layout, {}}, "rank 0", kTerms, 0, states_);
    for (uint32_t rank : {0u, 1u}) {
      arenas_.push_back(*BucketArena::Create("input", kElems * 4, true));
      ASSERT_TRUE(bucket_->AddInput(rank, UniqueFd(dup(arenas_.back().fd())), {}).ok());
    }
  }
  void SubmitBoth(uint64_t round) {
    ASSERT_FALSE(*bucket_->Submit(0, round, kStart));
    ASSERT_TRUE(*bucket_->Submit(1, round, kStart));
  }
  RoundResult Result(uint32_t chunk, uint64_t round) {
    RoundResult r;
    r.id = {{0, 0}, chunk, round};
    r.wire = WireFormat::kFloat16;
    r.elems = bucket_->whole().part().plan.Elems(chunk);
    r.workers = 2;
    const auto bytes = std::make_shared<std::vector<std::byte>>(2 * r.elems);
    r.payload = Payload(*bytes, bytes);
    return r;
  }

  ParameterStates states_;
  std::shared_ptr<NodeBucket> bucket_;
  std::vector<BucketArena> arenas_;
};

TEST_F(NodeBucketTest, IsReadyWhenAllWorkersHaveSubmittedAndNamesThoseMissing) {
  EXPECT_THAT(bucket_->waiting().missing, IsEmpty());
  EXPECT_FALSE(*bucket_->Submit(1, 1, kStart));
  EXPECT_THAT(bucket_->waiting().missing, ElementsAre(0));
  EXPECT_TRUE(*bucket_->Submit(0, 1, kStart));
  EXPECT_TRUE(bucket_->in_flight());
  EXPECT_THAT(bucket_->waiting().missing, IsEmpty());
}

TEST_F(NodeBucketTest, SubmitOutOfOrderIsRefused) {
  EXPECT_FALSE(bucket_->Submit(0, 2, kStart).ok());
  ASSERT_TRUE(bucket_->Submit(0, 1, kStart).ok());
  EXPECT_FALSE(bucket_->Submit(0, 1, kStart).ok());
  ASSERT_TRUE(bucket_->Submit(1, 1, kStart).ok());
  EXPECT_FALSE(bucket_->Submit(0, 2, kStart).ok()) << "round 1 is in flight";
}

TEST_F(NodeBucketTest, SubmitBeforeTheArenaCameIsRefused) {
  const auto bare =
      *NodeBucket::Create({{0, 0}, bucket_->layout(), {}}, "rank 0", kTerms, 0, states_);
  EXPECT_FALSE(bare->Submit(0, 1, kStart).ok());
}

TEST_F(NodeBucketTest, ArenaOfAnotherSizeIsRefused) {
  const auto bare =
      *NodeBucket::Create({{0, 0}, bucket_->layout(), {}}, "rank 0", kTerms, 0, states_);
  auto small = *BucketArena::Create("input", kElems * 4 - 4, true);
  EXPECT_FALSE(bare->AddInput(0, UniqueFd(dup(small.fd())), {}).ok());
  EXPECT_FALSE(bucket_->AddInput(0, UniqueFd(dup(arenas_[0].fd())), {}).ok()) << "twice";
}

TEST_F(NodeBucketTest, LastChunkCompletesTheRoundWhateverTheOrder) {
  SubmitBoth(1);
  EXPECT_FALSE(bucket_->is_running());
  bucket_->BeginRound(kUnknownLossScale);
  EXPECT_TRUE(bucket_->is_running());
  DenseCodec& whole = bucket_->whole();
  EXPECT_THAT(bucket_->CodecsInUse(), ElementsAre(&whole));
  bucket_->BeginPart(whole.part());
  EXPECT_EQ(bucket_->Outstanding(), std::pair(3u, 3u));
  for (uint32_t chunk : {2u, 0u, 1u}) {
    ASSERT_TRUE(bucket_->Claim(whole.part(), Result(chunk, 1)).ok());
    EXPECT_EQ(bucket_->FinishChunk(whole, whole.part(), Result(chunk, 1), kSecond), chunk == 1);
  }
  EXPECT_TRUE(bucket_->FinishCodec(whole.part()));
  const FinishedRound finished = bucket_->FinishRound(kStart + kSecond);
  EXPECT_EQ(finished.message.round, 1u);
  EXPECT_EQ(finished.message.workers, 2u);
  EXPECT_EQ(finished.message.decode_ns, 3 * static_cast<uint64_t>(ToNanos(kSecond)));
  EXPECT_EQ(finished.end - finished.ready_since, kSecond);
  EXPECT_FALSE(bucket_->in_flight());
  SubmitBoth(2);
}

TEST_F(NodeBucketTest, WorkersThatHaveNotFilledTheirArenaAreNamedOnceTheRoundRuns) {
  SubmitBoth(1);
  EXPECT_THAT(bucket_->UnfilledBy(), IsEmpty());
  bucket_->BeginRound(kUnknownLossScale);
  EXPECT_THAT(bucket_->UnfilledBy(), ElementsAre(0, 1));
  arenas_[0].PublishReady(3);
  EXPECT_THAT(bucket_->UnfilledBy(), ElementsAre(1));
}

}  // namespace
}  // namespace thalweg
