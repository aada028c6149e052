#include "server/aggregator/job_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/protocol.h"

namespace thalweg::job_places_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

JoinRequest Claiming(uint32_t nodes, uint32_t shards, const std::string& place = "") {
  JoinRequest request;
  request.num_nodes = nodes;
  request.num_shards = shards;
  request.place = place;
  return request;
}

TEST(JobPlacesTest, ShardsThatJobsClaimAreBoundedTogether) {
  JobPlaces places;
  const JoinRequest job = Claiming(1, kMaxShards);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(places.Check(job).ok());
    places.Take(job);
  }
  const absl::Status full = places.Check(job);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()),
              AllOf(HasSubstr("jobs of 32768 shards"), HasSubstr("no room for 8192 more")));
  places.Return(job);
  EXPECT_TRUE(places.Check(job).ok());
}

TEST(JobPlacesTest, OneAddressCannotTakeTheJobsOrNodesOfOthers) {
  for (const uint32_t nodes : {1u, 1024u}) {
    JobPlaces places;
    const JoinRequest stranger = Claiming(nodes, 1, "ipv4:10.0.0.1");
    uint64_t jobs = 0;
    for (; places.Check(stranger).ok(); ++jobs) places.Take(stranger);
    EXPECT_EQ(jobs, nodes == 1 ? 512u : 8u);
    EXPECT_THAT(std::string(places.Check(stranger).message()),
                HasSubstr("of them for ipv4:10.0.0.1, and no address may have more"));
    EXPECT_TRUE(places.Check(Claiming(nodes, 1, "ipv4:10.0.0.2")).ok());
    EXPECT_TRUE(places.Check(Claiming(nodes, 1)).ok());  // within the process
  }
}

}  // namespace
}  // namespace thalweg::job_places_test
