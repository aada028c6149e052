// CodecPlace is where the codecs of one bucket work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/base/layout.h"
#include "core/base/update.h"

namespace thalweg {

// A CodecPlace has what all codecs of one bucket use on this node.
struct CodecPlace {
  BucketId bucket;
  uint64_t chunk_bytes = 0;
  uint32_t num_shards = 1;
  bool is_alone = false;  // true on a job's only node, which sends nothing
  // The result of the whole bucket, in its own type; null when it is not in host memory.
  std::byte* result = nullptr;
  // Set where shards keep the bucket's weights: parts of one codec with one part have it.
  std::optional<UpdateRule> update = std::nullopt;
};

}  // namespace thalweg
