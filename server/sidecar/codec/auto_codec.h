// An auto codec chooses for a bucket by the predicted time that each candidate adds to a step. The
// same numbers on all nodes give the same choice: Join agrees on them, and the computation here is
// plain arithmetic in one order.
//
//   link     bytes that a node sends * the seconds that they are predicted to take with the shares
//            of the shards (server/plan/share_plan.h); as much comes back meanwhile. Without a
//            prediction bytes / rate, times num_nodes / num_shards if shards have more to carry
//   casts and lossy formats go chunk by chunk, so that everything overlaps:
//            max(link, computing at a node, computing at a shard) + a round trip
//   PowerSGD goes in two steps, of which nothing overlaps with the computing at a node:
//            computing at a node + max(link, computing at a shard) + two round trips
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/codec_cost.h"
#include "core/base/codec_spec.h"
#include "core/base/layout.h"
#include "core/exchange/link_speed.h"

namespace thalweg {

// AutoTerms are the numbers that a job's nodes have agreed on.
struct AutoTerms {
  std::vector<CodecSpec> candidates;  // as AutoCandidates gives them
  std::vector<CodecCost> costs;       // one per candidate
  LinkSpeed link;                     // without a rate there is no network to wait for
  uint32_t num_nodes = 1;
  uint32_t num_shards = 1;
  double seconds_per_byte = 0;  // ShareForecast's; 0: it is unknown
};

struct AutoChoice {
  uint32_t codec = 0;           // number of the chosen candidate
  std::vector<double> seconds;  // predicted time of each candidate
  // Explains the choice: "25.6 MB in 12 tensors at 12.5 MB/s: powersgd 27 ms (sends 301 kB,
  // computes 11 ms) rather than int8 …". Says that compression would not help where fp32 is chosen.
  std::string reason;
};

// Chooses for `tensors`, those of a bucket that auto decides about. Among candidates within 2 % of
// the fastest it chooses the first, which is the most exact. Thread-safe.
AutoChoice ChooseCodec(const BucketLayout& tensors, const AutoTerms& terms);

}  // namespace thalweg
