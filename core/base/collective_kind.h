// CollectiveKind numbers the collectives that a worker may ask for. The numeric values are part of
// the ipc format: never renumber.
#pragma once

#include <cstdint>

namespace thalweg {

// A group has N workers. Each gives one unit of elements, or N of them, one for each worker of the
// group, and gets one or N, as below; `root` is one of the workers.
enum class CollectiveKind : uint8_t {
  kAllReduce = 1,      // 1 → 1
  kReduce = 2,         // 1 → root gets 1
  kBroadcast = 3,      // root gives 1 → all others get 1
  kAllGather = 4,      // 1 → N
  kReduceScatter = 5,  // N → 1
  kGather = 6,         // 1 → root gets N
  kScatter = 7,        // root gives N → 1
  kBarrier = 8,        // nothing
};

// Returns true for the values above; any other value came from outside and must be refused.
constexpr bool IsValid(CollectiveKind kind) {
  return kind >= CollectiveKind::kAllReduce && kind <= CollectiveKind::kBarrier;
}

constexpr bool Folds(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}
constexpr bool HasRoot(CollectiveKind kind) {
  return kind == CollectiveKind::kReduce || kind == CollectiveKind::kBroadcast ||
         kind == CollectiveKind::kGather || kind == CollectiveKind::kScatter;
}

// Return how many units a worker of a group of `size` gives and gets.
constexpr uint64_t UnitsGiven(CollectiveKind kind, uint32_t size, bool is_root) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
      return 1;
    case CollectiveKind::kBroadcast:
      return is_root ? 1 : 0;
    case CollectiveKind::kReduceScatter:
      return size;
    case CollectiveKind::kScatter:
      return is_root ? size : 0;
    case CollectiveKind::kBarrier:
      return 0;
  }
  return 0;
}
constexpr uint64_t UnitsGot(CollectiveKind kind, uint32_t size, bool is_root) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kScatter:
      return 1;
    case CollectiveKind::kReduce:
      return is_root ? 1 : 0;
    case CollectiveKind::kBroadcast:
      return is_root ? 0 : 1;
    case CollectiveKind::kAllGather:
      return size;
    case CollectiveKind::kGather:
      return is_root ? size : 0;
    case CollectiveKind::kBarrier:
      return 0;
  }
  return 0;
}

// Returns torch's name: "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter",
// "gather", "scatter" or "barrier".
const char* Name(CollectiveKind kind);

}  // namespace thalweg
