// PlanShares decides which part of the gradients each of a job's shards sums, so that the links are
// done as early as possible (docs/placement.md). The functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/exchange/shares.h"

namespace thalweg {

// Links are the links of a job's machines, with rates in bytes per second each way; 0: unknown.
struct Links {
  std::vector<double> nodes;    // by node
  std::vector<uint32_t> hosts;  // by shard: the node that hosts it, or kNoHost
  std::vector<double> shards;   // by shard; not used for one that a node hosts
};

struct SharePlan {
  std::vector<uint32_t> shares;  // by shard, relative to their sum
  ShareForecast forecast;
};

// For each byte of gradient, the link of one of n nodes carries a byte each way, and n - 2 times
// the share of the shard that the node hosts; the link of a shard with a machine of its own carries
// n times its share. The shares make the longest time that a link takes as short as possible, and
// sum up to kShareTotal. If any rate is unknown, they are equal, and there is no forecast. `links`
// must have a node and a shard, and every node may host one shard.
//
// The forecast's advice is what makes that time shortest: one more aggregator, with the median rate
// of those that there are, or of the nodes if there is none, or a shard on each node that hosts
// none. If neither makes it shorter, only fewer bytes or a faster link can.
SharePlan PlanShares(const Links& links);

// Describes the plan for people: shares, time, bottleneck and advice. "shares of the shards: 40 %,
// 40 %, 20 %; 100 MB take 0.8 s, …".
std::string Describe(const SharePlan& plan);

}  // namespace thalweg
