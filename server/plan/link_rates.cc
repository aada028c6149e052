#include "server/plan/link_rates.h"

#include <algorithm>
#include <utility>

namespace thalweg {
namespace {

constexpr double kSameRate = 1.15;
// A measurement sends up to 4 MiB at once (server/transport/link_probe.h), and threads that wait
// for a core may take four milliseconds of its time.
constexpr double kNoiseSecondsPerByte = 4e-3 / (4 << 20);

// Returns whether the rates, of which `fast` is not the smaller one, may be the same.
bool MayBeTheSame(double slow, double fast) {
  return fast <= kSameRate * slow || 1 / slow - 1 / fast <= kNoiseSecondsPerByte;
}

}  // namespace

std::vector<uint32_t> HostsOf(const JoinRequest& request) {
  if (!request.hosts.empty()) return request.hosts;
  return std::vector<uint32_t>(request.num_shards, kNoHost);
}

std::vector<uint32_t> ShardsToMeasure(uint32_t node, uint32_t num_nodes,
                                      const std::vector<uint32_t>& hosts) {
  const size_t nodes = std::max(num_nodes, 1u);
  const size_t size = hosts.size();
  const bool any_hosted =
      std::any_of(hosts.begin(), hosts.end(), [](uint32_t host) { return host != kNoHost; });
  const size_t first = size_t{node} + (any_hosted ? 1 : 0);
  std::vector<uint32_t> shards;
  const auto measure = [&](size_t shard) {
    if (hosts[shard] != node) shards.push_back(static_cast<uint32_t>(shard));
  };
  for (size_t shard = first % nodes; shard < size; shard += nodes) measure(shard);
  if (nodes >= 4) {
    // With 4 nodes, 1 + nodes / 2 would lead to the other neighbour.
    const size_t far = (node + (nodes == 4 ? 2 : 1 + nodes / 2)) % nodes;
    if (far < size && hosts[far] != kNoHost) measure(far);
  }
  // With fewer shards than nodes, some nodes have none yet.
  for (size_t i = 0; i < size && shards.empty(); ++i) measure((first + i) % size);
  return shards;
}

LinkRates::LinkRates(uint32_t num_nodes, std::vector<uint32_t> hosts)
    : num_nodes_(num_nodes),
      hosts_(std::move(hosts)),
      begin_with_(hosts_.size()),
      links_(num_nodes_ + hosts_.size()) {
  for (uint32_t node = 0; node < num_nodes; ++node) {
    const std::vector<uint32_t> shards = ShardsToMeasure(node, num_nodes, hosts_);
    if (!shards.empty()) ++begin_with_[shards.front()];
  }
}

size_t LinkRates::LinkOf(size_t shard) const {
  return hosts_[shard] == kNoHost ? num_nodes_ + shard : hosts_[shard];
}

void LinkRates::Add(uint32_t node, std::span<const double> shard_rates) {
  for (size_t shard = 0; shard < shard_rates.size(); ++shard) {
    const double rate = shard_rates[shard];
    for (const size_t number : {size_t{node}, LinkOf(shard)}) {
      Range& link = links_[number];
      link.least = std::max(link.least, rate);
      link.most = std::max(link.most, rate * std::max(begin_with_[shard], 1u));
    }
  }
}

Links LinkRates::Resolve() const {
  std::vector<size_t> known;  // the slowest first
  for (size_t number = 0; number < links_.size(); ++number) {
    if (links_[number].least > 0) known.push_back(number);
  }
  std::sort(known.begin(), known.end(), [&](size_t a, size_t b) {
    return std::pair(links_[a].least, a) < std::pair(links_[b].least, b);
  });
  std::vector<double> rates(links_.size());
  for (size_t begin = 0, end = 0; begin < known.size(); begin = end) {
    double most = links_[known[begin]].most;
    double sum = 0;
    for (; end < known.size() && MayBeTheSame(most, links_[known[end]].least); ++end) {
      most = std::max(most, links_[known[end]].most);
      sum += links_[known[end]].least;
    }
    for (size_t i = begin; i < end; ++i) rates[known[i]] = sum / static_cast<double>(end - begin);
  }
  const auto shards = rates.begin() + static_cast<std::ptrdiff_t>(num_nodes_);
  return {{rates.begin(), shards}, hosts_, {shards, rates.end()}};
}

}  // namespace thalweg
