// What computing with a codec costs, as a node has measured it (server/sidecar/codec/codec_costs.h)
// and as all nodes of a job take it to be, so that they choose alike.
#pragma once

#include <algorithm>

namespace thalweg {

// In seconds for each byte of gradient in fp32, unless it says otherwise.
struct CodecCost {
  // Encoding at a node, once its workers' shares have been folded, and decoding there.
  double node = 0;
  // Folding what all nodes send; with PowerSGD for each byte in fp32 of what one node sends.
  double shard = 0;
  double factors = 0;  // orthogonalising at a node, for each byte of factors in fp32

  bool operator==(const CodecCost&) const = default;
};

// The larger of each cost.
inline CodecCost Slower(const CodecCost& a, const CodecCost& b) {
  return {std::max(a.node, b.node), std::max(a.shard, b.shard), std::max(a.factors, b.factors)};
}

}  // namespace thalweg
