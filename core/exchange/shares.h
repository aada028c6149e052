// Shares say which part of a job's gradients each of its shards sums, and what that predicts.
#pragma once

#include <cstdint>

namespace thalweg {

// An Advice names what would shorten an exchange most.
enum class Advice : uint8_t {
  kNone = 0,         // the rates are unknown, or there is one node
  kAggregator = 1,   // one more, with a machine like those that there are
  kLocalShards = 2,  // a shard on every node
  kFewerBytes = 3,   // no shard: a codec that sends less, or a faster link
};

// A ShareForecast says how long the shares of a job's shards keep the links busy.
struct ShareForecast {
  double seconds_per_byte = 0;       // of encoded gradient; 0: the links' rates are unknown
  double ring_seconds_per_byte = 0;  // what a ring all-reduce over the nodes would take
  // The link that takes longest: that of a shard with a machine of its own, or of a node.
  bool at_shard = false;
  uint32_t number = 0;  // of the shard or node
  double load = 0;      // bytes that the link carries each way for a byte of gradient
  Advice advice = Advice::kNone;
  double advised_seconds_per_byte = 0;  // with one more aggregator, or with shards on all nodes

  bool operator==(const ShareForecast&) const = default;
};

// The shares of a job's shards sum up to this. All numbers up to 16 divide it, so that as many
// shards can have exactly equal shares.
inline constexpr uint32_t kShareTotal = 720'720;

}  // namespace thalweg
