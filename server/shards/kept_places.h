// KeptPlaces are what an earlier process of a node had on a job's shards.
#pragma once

#include <cstdint>
#include <vector>

#include "core/exchange/join.h"
#include "core/exchange/rounds.h"
#include "server/shards/placement.h"

namespace thalweg {

struct KeptPlaces {
  struct Bucket {
    Placement::Placed placed;
    BucketAnnouncement announcement;
    std::vector<RoundResult> results;  // the last one of each chunk; none before the first
  };
  std::vector<Terms> terms;  // by shard: epoch, chunk_bytes and window_chunks
  std::vector<uint32_t> shares;
  std::vector<Bucket> buckets;
};

}  // namespace thalweg
