// These tests check what a ShardGroup measures, and which shares it uses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <vector>

#include "core/base/testing/test_patience.h"
#include "server/shards/shard_group.h"
#include "server/shards/testing/fake_shard.h"

namespace thalweg::shard_shares_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The shards of a job as one node sees them.
class ShardSharesTest : public ::testing::Test {
 protected:
  absl::Status Join(uint32_t node, uint32_t num_nodes, const std::vector<uint32_t>& hosts = {}) {
    std::vector<Shard*> shards;
    for (FakeShard& shard : shards_) shards.push_back(&shard);
    group_ = std::make_unique<ShardGroup>(shards, metrics_);
    JoinRequest request;
    request.node = node;
    request.num_nodes = num_nodes;
    request.hosts = hosts;
    return group_->Join(
        request, [](uint32_t) { return std::make_shared<NullSink>(); }, Now() + kTestPatience);
  }
  // Makes the shards answer with these weights.
  void SetWeights(const std::vector<uint32_t>& weights) {
    for (size_t k = 0; k < weights.size(); ++k) shards_[k].weight = weights[k];
  }
  std::vector<int> Measurements() {
    std::vector<int> counts;
    for (const FakeShard& shard : shards_) counts.push_back(shard.num_measurements);
    return counts;
  }
  // Returns the shards of a bucket's chunks.
  std::vector<uint32_t> Place(uint64_t chunks) {
    const BucketLayout layout{DType::kFloat32, {{"w", {static_cast<int64_t>(10 * chunks)}}}};
    return group_->RegisterBucket({{}, layout}, {10 * chunks, 10}, Now() + kTestPatience)
        .value()
        .shards;
  }
  double Share(const char* shard) {
    return metrics_.GetGauge("thalweg_sidecar_shard_share", "", {{"shard", shard}}).Value();
  }

  std::deque<FakeShard> shards_ = std::deque<FakeShard>(3);
  MetricRegistry metrics_;
  std::unique_ptr<ShardGroup> group_;
};

TEST_F(ShardSharesTest, HostMeasuresOthersButNotItself) {
  shards_[0].link = {5e7, std::chrono::milliseconds(1)};
  shards_[2].link = {1e8, std::chrono::milliseconds(3)};
  ASSERT_TRUE(Join(1, 2, {0, 1, kNoHost}).ok());
  EXPECT_THAT(Measurements(), ElementsAre(1, 0, 1));
  EXPECT_THAT(shards_[0].joined.shard_rates, ElementsAre(5e7, 0, 1e8));
  for (const FakeShard& shard : shards_) {
    EXPECT_THAT(shard.joined.hosts, ElementsAre(0, 1, kNoHost));
    EXPECT_EQ(shard.joined.link.bytes_per_second, 5e7);
    EXPECT_EQ(shard.joined.link.round_trip, std::chrono::milliseconds(3));
  }
}

TEST_F(ShardSharesTest, OnlyTheFirstShardIsToldTheRates) {
  shards_[1].link = {1e8, {}};
  ASSERT_TRUE(Join(1, 3).ok());
  EXPECT_THAT(Measurements(), ElementsAre(0, 1, 0));
  EXPECT_THAT(shards_[0].joined.shard_rates, ElementsAre(0, 1e8, 0));
  EXPECT_THAT(shards_[1].joined.shard_rates, IsEmpty());
  EXPECT_THAT(shards_[2].joined.shard_rates, IsEmpty());
}

TEST_F(ShardSharesTest, ShardWithoutANetworkIsNotTheSlowestLink) {
  shards_[2].link = {1e8, {}};
  ASSERT_TRUE(Join(0, 1).ok());
  EXPECT_THAT(Measurements(), ElementsAre(1, 1, 1));
  EXPECT_EQ(shards_[0].joined.link.bytes_per_second, 1e8);
}

TEST_F(ShardSharesTest, FirstShardsSharesDecideWithoutWeights) {
  SetWeights({0, 0, 0});
  shards_[0].agreed_shares = {kShareTotal / 4, 0, 3 * (kShareTotal / 4)};
  shards_[0].agreed_forecast = {1e-8, 2e-8, true, 2, 1.5};
  shards_[1].agreed_shares = {kShareTotal};
  ASSERT_TRUE(Join(0, 2).ok());
  EXPECT_EQ(group_->plan().shares, shards_[0].agreed_shares);
  EXPECT_EQ(group_->plan().forecast, shards_[0].agreed_forecast);
  EXPECT_EQ(Share("0"), 0.25);
  EXPECT_EQ(Share("1"), 0);
  EXPECT_EQ(Share("2"), 0.75);
  EXPECT_THAT(Place(4), ElementsAre(2, 2, 0, 2));
}

TEST_F(ShardSharesTest, ShardWithoutAShareGetsItsWindowBesideOthers) {
  SetWeights({0, 0, 0});
  shards_[0].agreed_shares = {kShareTotal / 2, 0, kShareTotal / 2};
  ASSERT_TRUE(Join(0, 2).ok());
  ASSERT_TRUE(group_->Contribute(0, {}).ok());
  // As a collective does that only the shard's node wants something of.
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(group_->Contribute(1, {}).ok());
  EXPECT_EQ(shards_[1].chunks().size(), 2u);  // the window of a FakeShard
}

TEST_F(ShardSharesTest, AnyWeightTakesThePlaceOfAllShares) {
  SetWeights({0, 0, 2});
  shards_[0].agreed_shares = {kShareTotal, 0, 0};
  shards_[0].agreed_forecast.seconds_per_byte = 1;
  ASSERT_TRUE(Join(0, 2).ok());
  EXPECT_THAT(group_->plan().shares, ElementsAre(1, 1, 2));
  EXPECT_EQ(group_->plan().forecast, ShareForecast());
  EXPECT_EQ(Share("2"), 0.5);
  EXPECT_THAT(Place(4), ElementsAre(2, 0, 1, 2));
}

TEST_F(ShardSharesTest, OlderAggregatorsNeedNoShares) {
  ASSERT_TRUE(Join(0, 2).ok());  // their weight is 1 unless it is set
  EXPECT_THAT(group_->plan().shares, ElementsAre(1, 1, 1));
  EXPECT_THAT(Place(3), ElementsAre(0, 1, 2));
}

TEST_F(ShardSharesTest, SharesOfAnotherNumberOfShardsAreRefused) {
  SetWeights({0, 0, 0});
  shards_[0].agreed_shares = {kShareTotal};
  const absl::Status joined = Join(0, 2);
  EXPECT_EQ(joined.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(joined.message()), HasSubstr("the shares of 1 shards, expected 3"));
}

TEST_F(ShardSharesTest, HostsOfAnotherNumberOfShardsAreRefused) {
  const absl::Status joined = Join(0, 2, {0, 1});
  EXPECT_EQ(joined.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(joined.message()), HasSubstr("hosts of 2 shards, there are 3"));
}

}  // namespace
}  // namespace thalweg::shard_shares_test
