// This header finds the rates of a job's links. Each node measures some shards; whatever it could
// send to one in a second, both ends' links carry at least that much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/exchange/join.h"
#include "server/plan/share_plan.h"

namespace thalweg {

// Returns the node that hosts each of the job's shards, or kNoHost.
std::vector<uint32_t> HostsOf(const JoinRequest& request);

// Returns the shards that `node` measures, in order; `hosts` is by shard. All nodes together
// measure every shard with a machine of its own, and every node measures some shard other than the
// one that it hosts, if there is one. Where nodes host shards, each measures its successor's: a
// link then carries one measurement each way at a time. From 4 nodes on it also measures one far
// from its neighbours, which may both be slower than itself.
std::vector<uint32_t> ShardsToMeasure(uint32_t node, uint32_t num_nodes,
                                      const std::vector<uint32_t>& hosts);

// LinkRates gathers what the nodes of a job have measured. Thread-compatible.
class LinkRates {
 public:
  LinkRates(uint32_t num_nodes, std::vector<uint32_t> hosts);

  // Adds the measurements of `node`, as in JoinRequest::shard_rates.
  void Add(uint32_t node, std::span<const double> shard_rates);

  // Returns the rates of all links. Each is the fastest measurement that a link took part in. Rates
  // between which the measurements cannot tell are replaced by their mean, so that noise does not
  // make equal links unequal: those that differ by 15 % or, on fast links, by what the scheduling
  // of threads costs, and those that differ by what nodes that measured the same shard at the same
  // time may have taken from each other.
  Links Resolve() const;

 private:
  // A Range contains the rate of a link. Most is what it would be if all nodes that began with the
  // same shard had measured it at the same time.
  struct Range {
    double least = 0;
    double most = 0;
  };

  // Returns the number in links_ of the link that leads to a shard.
  size_t LinkOf(size_t shard) const;

  const size_t num_nodes_;
  const std::vector<uint32_t> hosts_;
  std::vector<uint32_t> begin_with_;  // by shard: the number of nodes that measure it first
  std::vector<Range> links_;          // those of the nodes, then those of the shards
};

}  // namespace thalweg
