// This test measures the link to a shard over gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "server/transport/testing/loopback.h"

namespace thalweg::measured_link_test {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;

TimePoint Soon() { return Now() + kTestPatience; }

using MeasuredLinkTest = Loopback;

TEST_F(MeasuredLinkTest, LinkIsMeasuredWithoutJoining) {
  const TimePoint begin = Now();
  const auto link = remote_->MeasureLink(1, Soon(), {});
  const Duration took = Now() - begin;
  ASSERT_TRUE(link.ok()) << link.status();
  // The test runs over loopback on a busy machine, so the bounds are only physical ones.
  EXPECT_GT(link->round_trip, Duration::zero());
  EXPECT_LE(link->round_trip, took);
  EXPECT_GT(link->bytes_per_second, (64 << 10) / ToSeconds(took));
  EXPECT_TRUE(shard_.joins.Get().empty());
}

TEST_F(MeasuredLinkTest, LinkIsMeasuredAgainOnlyBesideOtherNodes) {
  const auto first = remote_->MeasureLink(4, Soon(), {});
  ASSERT_TRUE(first.ok()) << first.status();
  const auto again = remote_->MeasureLink(4, Soon(), {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->bytes_per_second, first->bytes_per_second);
  server_.reset();
  EXPECT_TRUE(remote_->MeasureLink(4, Soon(), {}).ok());
  EXPECT_FALSE(remote_->MeasureLink(5, Now() + seconds(1), {}).ok());
}

TEST_F(MeasuredLinkTest, LinkToNobodyIsUnavailableNamingTheAddress) {
  const std::string address = server_->address();
  server_.reset();
  const auto node = RemoteShard::Create(address, {}, metrics_);
  const absl::Status status = node->MeasureLink(1, Now() + seconds(1), {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("aggregator at " + address), ContainsRegex("within (1|0\\.[0-9]) s"),
                    HasSubstr("is it running")));
}

}  // namespace
}  // namespace thalweg::measured_link_test
