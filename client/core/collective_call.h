// What a worker says of a group of workers, and of its part in a collective of theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/collective_kind.h"
#include "core/base/dtype.h"
#include "core/base/fold.h"

namespace thalweg {

// All members of a group say the same of it, but for their own rank.
struct WorkerGroup {
  uint32_t number = 0;          // in the job; not 0
  uint32_t rank = 0;            // of this worker in the group
  std::vector<uint32_t> nodes;  // by rank in the group: the number of its node
  std::string name;             // for people
};

// A CollectiveCall is one worker's part in a collective; see collective_kind.h. All workers of the
// group say the same, but for the memory.
struct CollectiveCall {
  static constexpr bool is_ordered = true;

  uint32_t group = 0;
  CollectiveKind kind = CollectiveKind::kBarrier;
  Fold fold = Fold::kNone;
  DType dtype = DType::kUInt8;
  uint32_t root = 0;   // rank in the group
  uint64_t elems = 0;  // of one unit
  Duration timeout{};
  // The values, in pieces one after the other; they are copied.
  std::vector<std::span<const std::byte>> given = {};
  // Where the result goes, in pieces one after the other; written before `done` is called.
  std::vector<std::span<std::byte>> got = {};
};

// A PeerCall sends values to one other worker of a group, or receives them. A receive takes what
// the peer sends with the same tag, in the order of its sends; both name the same number of bytes.
struct PeerCall {
  enum class Way { kSend, kReceive };

  uint32_t group = 0;
  Way way = Way::kSend;
  std::optional<uint32_t> peer = std::nullopt;  // rank in the group; a receive's may be any
  uint64_t tag = 0;
  Duration timeout{};
  std::span<const std::byte> given = {};         // of a send; copied
  std::span<std::byte> got = {};                 // of a receive; written before `done` is called
  std::function<void(uint32_t)> from = nullptr;  // of a receive: hears the sender before `done`
  // Begins in the order of collectives: what callbacks of earlier ones begin comes first.
  bool is_ordered = false;
};

}  // namespace thalweg
