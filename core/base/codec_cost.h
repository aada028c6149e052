// CodecCost is the cost of computing with a codec, as a node has measured it
// (server/sidecar/codec/codec_costs.h) or as all nodes of a job agree on it, so that they choose
// alike.
#pragma once

#include <algorithm>

namespace thalweg {

// The unit is seconds for each byte of gradient in fp32, unless a member says otherwise.
struct CodecCost {
  // Encoding at a node, after its workers' shares have been folded, and decoding there.
  double node = 0;
  // Folding the payloads of all nodes; with PowerSGD for each byte in fp32 that one node sends.
  double shard = 0;
  double factors = 0;  // orthogonalising at a node, for each byte of factors in fp32

  bool operator==(const CodecCost&) const = default;
};

// Returns the larger of each cost.
inline CodecCost Slower(const CodecCost& a, const CodecCost& b) {
  return {std::max(a.node, b.node), std::max(a.shard, b.shard), std::max(a.factors, b.factors)};
}

}  // namespace thalweg
