// LinkSpeed says how fast a node and its shards can speak to each other.
#pragma once

#include "core/base/clock.h"

namespace thalweg {

// LinkSpeed is the speed of the link between a node and its shards, once in each direction.
struct LinkSpeed {
  double bytes_per_second = 0;  // 0: there is no network
  Duration round_trip{};
};

}  // namespace thalweg
