// A ShardPlace says where one of a job's shards is.
#pragma once

#include <cstdint>
#include <string>

namespace thalweg {

// The shard has a machine of its own.
inline constexpr uint32_t kNoHost = UINT32_MAX;

struct ShardPlace {
  std::string address;      // host:port
  uint32_t host = kNoHost;  // the node whose sidecar serves it
  bool operator==(const ShardPlace&) const = default;
};

}  // namespace thalweg
