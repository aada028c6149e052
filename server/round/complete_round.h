// CompleteRound is a round with all its contributions.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/exchange/rounds.h"

namespace thalweg {

// A Lateness is what becomes of a node's contribution to QuorumRounds when others' update is over.
struct Lateness {
  uint64_t updates = 0;                 // that the node did not know of; 0: it is in time
  std::optional<uint64_t> answer = {};  // the node gets this version of the weights, or a later one
};

// The payloads are those of the nodes from which the collective takes values, in node order.
struct CompleteRound {
  RoundId id;
  WireFormat wire = WireFormat::kFloat32;
  uint64_t elems = 0;
  std::vector<Payload> payloads;
  double loss_scale = kUnknownLossScale;  // what the first of these nodes has named
  Duration open{};                        // time since the first contribution
  Duration missing_one{};                 // time since the last but one; unused with one node
  Collective collective = {};
  uint64_t settings = 0;                // that contributions name
  std::vector<uint32_t> nodes = {};     // whose payload each is
  std::vector<uint32_t> workers = {};   // how many workers that node has
  std::vector<uint32_t> results = {};   // the nodes that get the result, ascending
  std::vector<uint32_t> receipts = {};  // the others of the group, which get an empty payload
  bool is_lone = false;                 // one node's, which waits for no other
  // An update of nodes that number their rounds by themselves (QuorumRounds): the number of each
  // payload's, and the nodes that get the result, each with that of its own round. Without payloads
  // these get the weights as they are.
  std::vector<uint64_t> rounds = {};
  std::vector<std::pair<uint32_t, uint64_t>> answers = {};
};

}  // namespace thalweg
