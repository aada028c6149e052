#include "server/sidecar/bucket/node_bucket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "core/base/protocol.h"
#include "server/sidecar/device/cpu_device.h"

namespace thalweg::node_bucket_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr TimePoint kStart{};
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

  ParameterStates states_;
  std::shared_ptr<NodeBucket> bucket_;
  std::vector<BucketArena> arenas_;
};

TEST_F(NodeBucketTest, SubmitBeforeTheArenaCameIsRefused) {
  const auto bare =
      *NodeBucket::Create({{0, 0}, bucket_->layout(), {}}, "rank 0", kTerms, 0, states_);
  EXPECT_FALSE(bare->Submit(0, {{0, 0}, 1}, kStart).ok());
}

TEST_F(NodeBucketTest, ArenaOfAnotherSizeIsRefused) {
  const auto bare =
      *NodeBucket::Create({{0, 0}, bucket_->layout(), {}}, "rank 0", kTerms, 0, states_);
  auto small = *BucketArena::Create("input", kElems * 4 - 4, true);
  EXPECT_FALSE(bare->AddInput(0, UniqueFd(dup(small.fd())), {}).ok());
  EXPECT_FALSE(bucket_->AddInput(0, UniqueFd(dup(arenas_[0].fd())), {}).ok()) << "twice";
}

TEST_F(NodeBucketTest, WorkersThatHaveNotFilledTheirArenaAreNamedOnceTheRoundRuns) {
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(bucket_->Submit(rank, {{0, 0}, 1}, kStart).ok());
  EXPECT_THAT(bucket_->UnfilledBy(), IsEmpty());
  bucket_->BeginRound(kUnknownLossScale);
  EXPECT_THAT(bucket_->UnfilledBy(), ElementsAre(0, 1));
  arenas_[0].PublishReady(3);
  EXPECT_THAT(bucket_->UnfilledBy(), ElementsAre(1));
}

}  // namespace
}  // namespace thalweg::node_bucket_test
