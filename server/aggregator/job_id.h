// JobId tells the jobs of a shard apart.
#pragma once

#include <compare>
#include <string>

namespace thalweg {

struct JobId {
  std::string name;
  std::string identity;  // see JoinRequest
  auto operator<=>(const JobId&) const = default;
};

}  // namespace thalweg
