#include "server/sidecar/job/shard_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "core/base/protocol.h"
#include "server/shards/testing/fake_shard.h"

namespace thalweg::shard_directory_test {
namespace {

using ::testing::HasSubstr;

class FakeSigner : public JobSigner {
 public:
  explicit FakeSigner(std::string key) : key_(std::move(key)) {}
  const std::string& public_key() const override { return key_; }
  std::string Sign(const std::string&) const override { return ""; }

 private:
  const std::string key_;
};

class ShardDirectoryTest : public ::testing::Test {
 protected:
  ShardDirectory Directory(Shard* hosted) {
    ShardDirectory::Hosted host;
    if (hosted != nullptr) {
      host = {hosted, "10.0.0.1:7100", [this](const std::string& job, const std::string& identity) {
                invited_ = std::make_shared<std::string>(job + ", " + identity);
                return invited_;
              }};
    }
    return ShardDirectory({{&configured_},
                           {"agg:7070"},
                           host,
                           [this](const std::string& address) {
                             connected_.push_back(address);
                             return std::make_shared<FakeShard>();
                           },
                           [](const std::string& secret) {
                             return std::make_shared<const FakeSigner>("key of " + secret);
                           },
                           make_returning_});
  }
  static ipc::Hello NodeOne(std::vector<ShardPlace> shards) {
    ipc::Hello hello;
    hello.node = 1;
    hello.num_nodes = 2;
    hello.shards = std::move(shards);
    return hello;
  }

  FakeShard configured_, own_;
  std::vector<std::string> connected_;
  std::function<std::shared_ptr<Shard>(std::shared_ptr<Shard>)> make_returning_;
  std::shared_ptr<std::string> invited_;
};

TEST_F(ShardDirectoryTest, JobThatNamesNoShardsGetsTheConfiguredOnes) {
  ShardDirectory directory = Directory(nullptr);
  const auto shards = directory.ShardsOf(NodeOne({}));
  ASSERT_TRUE(shards.ok());
  ASSERT_EQ(shards->shards.size(), 1u);
  EXPECT_EQ(shards->shards[0].get(), &configured_);
}

TEST_F(ShardDirectoryTest, NodesThatHaveNoShardToMeetAtAreToldAtOnce) {
  ShardDirectory::Options options;
  options.configured = {&configured_};
  options.are_own = true;
  ShardDirectory directory(std::move(options));
  ipc::Hello hello = NodeOne({});
  const auto shards = directory.ShardsOf(hello);
  EXPECT_TRUE(absl::IsFailedPrecondition(shards.status()));
  EXPECT_THAT(std::string(shards.status().message()),
              testing::HasSubstr("the workers form 2 nodes, but the sidecar of node 1 knows no "
                                 "aggregator at which they could meet"));
  hello.node = 0;
  hello.num_nodes = 1;
  EXPECT_TRUE(directory.ShardsOf(hello).ok());
}

TEST_F(ShardDirectoryTest, OwnShardIsCalledDirectlyAndOthersByTheirAddress) {
  ShardDirectory directory = Directory(&own_);
  const auto shards =
      directory.ShardsOf(NodeOne({{"10.0.0.2:7100", 0}, {"10.0.0.1:7100", 1}, {"agg:1", kNoHost}}));
  ASSERT_TRUE(shards.ok());
  ASSERT_EQ(shards->shards.size(), 3u);
  EXPECT_EQ(shards->shards[1].get(), &own_);
  EXPECT_EQ(connected_, (std::vector<std::string>{"10.0.0.2:7100", "agg:1"}));
}

TEST_F(ShardDirectoryTest, AllShardsMayForgetEachJobAndItsNodeReturns) {
  std::vector<std::shared_ptr<Shard>> wrapped;
  make_returning_ = [&](std::shared_ptr<Shard> shard) {
    wrapped.push_back(std::move(shard));
    return std::make_shared<FakeShard>();
  };
  ShardDirectory directory = Directory(&own_);
  const auto first = directory.ShardsOf(NodeOne({{"10.0.0.2:7100", 0}, {"10.0.0.1:7100", 1}}));
  const auto second = directory.ShardsOf(NodeOne({{"10.0.0.2:7100", 0}}));
  const auto third = directory.ShardsOf(NodeOne({}));
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  ASSERT_EQ(wrapped.size(), 4u);
  EXPECT_EQ(wrapped[1].get(), &own_);
  EXPECT_EQ(wrapped[0], wrapped[2]);
  EXPECT_NE(first->shards[0], second->shards[0]);
  EXPECT_EQ(wrapped[3].get(), &configured_);
}

TEST_F(ShardDirectoryTest, JobsShareAConnectionUntilTheLastOneHasEnded) {
  ShardDirectory directory = Directory(&own_);
  auto first = directory.ShardsOf(NodeOne({{"10.0.0.2:7100", 0}}));
  auto second = directory.ShardsOf(NodeOne({{"10.0.0.2:7100", 0}}));
  EXPECT_EQ(first->shards[0], second->shards[0]);
  const std::weak_ptr<Shard> shard = first->shards[0];
  first->shards.clear();
  directory.Prune();
  EXPECT_FALSE(shard.expired());
  second->shards.clear();
  directory.Prune();
  EXPECT_TRUE(shard.expired());
}

TEST_F(ShardDirectoryTest, ShardThatThisSidecarIsToHostButDoesNotIsRefused) {
  ShardDirectory directory = Directory(nullptr);
  const absl::Status refused = directory.ShardsOf(NodeOne({{"10.0.0.1:7100", 1}})).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--shard-listen"));
}

TEST_F(ShardDirectoryTest, AddressThatNoHostHasIsRefusedAndNotKept) {
  ShardDirectory directory = Directory(&own_);
  for (const std::string& address :
       {std::string(), std::string("10.0.0.2:7100\nx"), std::string(kMaxNameBytes + 1, '1')}) {
    const absl::Status refused = directory.ShardsOf(NodeOne({{address, 0}})).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("address of a shard '"));
  }
  EXPECT_TRUE(connected_.empty());
}

TEST_F(ShardDirectoryTest, OfferHasTheAddressAndInvitesTheJobWhileItLasts) {
  ShardDirectory directory = Directory(&own_);
  auto offer = directory.OfferTo({kIpcVersion, "job", "secret"});
  ASSERT_TRUE(offer.ok());
  EXPECT_EQ(offer->answer.address, "10.0.0.1:7100");
  EXPECT_EQ(offer->answer.aggregators, (std::vector<std::string>{"agg:7070"}));
  EXPECT_EQ(*invited_, "job, key of secret");
  EXPECT_EQ(invited_.use_count(), 2);
  offer->invitation.reset();
  EXPECT_EQ(invited_.use_count(), 1);
}

TEST_F(ShardDirectoryTest, OwnNodeIsInvitedWhileItsJobLasts) {
  ShardDirectory directory = Directory(&own_);
  ipc::Hello hello = NodeOne({{"10.0.0.1:7100", 1}});
  hello.job = "job";
  hello.secret = "secret";
  auto shards = directory.ShardsOf(hello);
  ASSERT_TRUE(shards.ok());
  EXPECT_EQ(shards->signer->public_key(), "key of secret");
  EXPECT_EQ(*invited_, "job, key of secret");
  EXPECT_EQ(invited_.use_count(), 2);
  shards = ShardDirectory::JobShards();
  EXPECT_EQ(invited_.use_count(), 1);
}

TEST_F(ShardDirectoryTest, OfferOfASidecarThatHostsNoneHasNoAddress) {
  ShardDirectory directory = Directory(nullptr);
  const auto offer = directory.OfferTo({kIpcVersion, "job", "secret"});
  ASSERT_TRUE(offer.ok());
  EXPECT_EQ(offer->answer.address, "");
  EXPECT_EQ(offer->invitation, nullptr);
}

}  // namespace
}  // namespace thalweg::shard_directory_test
