#include "server/round/same_job.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/shard_place.h"

namespace thalweg::same_job_test {
namespace {

JoinRequest Request(uint32_t node) {
  JoinRequest request;
  request.node = node;
  request.node_name = node == 0 ? "alpha" : "beta";
  request.num_nodes = 2;
  request.world_size = 4;
  request.num_shards = 2;
  return request;
}

TEST(SameJobTest, WhatBelongsToANodeMayDiffer) {
  JoinRequest other = Request(1);
  other.workers = 3;
  other.link.bytes_per_second = 7;
  other.shard_rates = {1, 2};
  EXPECT_TRUE(CheckSameJob(Request(0), other).ok());
}

TEST(SameJobTest, ShardsThatNobodyHostsMayBeListedOrNot) {
  JoinRequest other = Request(1);
  other.hosts = {kNoHost, kNoHost};
  EXPECT_TRUE(CheckSameJob(Request(0), other).ok());
}

TEST(SameJobTest, TimeoutsMayDifferInWhatTheWireDoesNotCarry) {
  JoinRequest first = Request(0);
  first.round_timeout = std::chrono::microseconds(800'800);
  JoinRequest other = Request(1);
  other.round_timeout = std::chrono::milliseconds(800);
  EXPECT_TRUE(CheckSameJob(first, other).ok());
}

TEST(SameJobTest, DifferenceIsNamedWithBothValuesAndNodes) {
  const std::vector<std::pair<std::function<void(JoinRequest&)>, std::string>> cases = {
      {[](JoinRequest& r) { r.resume.emplace(); },
       "the job's beginning is before this aggregator was restarted, node 0 (alpha) says now"},
      {[](JoinRequest& r) { r.num_nodes = 3; }, "the number of nodes is 3, node 0 (alpha) says 2"},
      {[](JoinRequest& r) { r.world_size = 5; }, "the world size is 5, node 0 (alpha) says 4"},
      {[](JoinRequest& r) { r.num_shards = 1; },
       "the number of aggregators is 1, node 0 (alpha) says 2"},
      {[](JoinRequest& r) { r.shard = 1; },
       "this aggregator's place in the list of aggregators is 1, node 0 (alpha) says 0"},
      {[](JoinRequest& r) { r.hosts = {1, kNoHost}; },
       "the list of nodes that host the shards is '1, none', node 0 (alpha) says 'none, none'"},
      {[](JoinRequest& r) { r.chunk_bytes = 64; },
       "the chunk size in bytes is 64, node 0 (alpha) says 0"},
      {[](JoinRequest& r) { r.window_chunks = 8; },
       "the window in chunks is 8, node 0 (alpha) says 0"},
      {[](JoinRequest& r) { r.round_timeout = std::chrono::seconds(8); },
       "the timeout of a round in ms is 8000, node 0 (alpha) says 0"},
      {[](JoinRequest& r) { r.costs.resize(1); },
       "the number of codecs with a cost is 1, node 0 (alpha) says 0"},
  };
  for (const auto& [change, expected] : cases) {
    JoinRequest other = Request(1);
    change(other);
    EXPECT_EQ(CheckSameJob(Request(0), other),
              absl::InvalidArgumentError("node 1 (beta) says " + expected));
  }
}

}  // namespace
}  // namespace thalweg::same_job_test
