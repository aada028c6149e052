// Messages about groups of workers, their collectives, and what workers send each other. message.h
// says how they are written.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/collective_kind.h"
#include "core/base/dtype.h"
#include "core/base/fold.h"

namespace thalweg::ipc {

// MakeGroup is a worker's message that it takes part in a group of workers; all of them say the
// same, but for their own rank. It comes before the group's first collective.
struct MakeGroup {
  uint32_t group = 0;           // its number in the job, not 0
  uint32_t rank = 0;            // of this worker in the group
  std::vector<uint32_t> nodes;  // by rank in the group: the number of its node
  std::string name;             // for people
  bool operator==(const MakeGroup&) const = default;
};

// ShareArena gives the peer a descriptor: an arena for values of collectives, until another one of
// the same number takes its place, or the connection ends.
struct ShareArena {
  uint32_t number = 0;  // as the sender counts its arenas, from 1
  uint64_t bytes = 0;
  bool operator==(const ShareArena&) const = default;
};

// Collect is a worker's message that it takes part in a collective. Its values, as many units
// (collective_kind.h) as it gives, are in `values` or at the beginning of an arena. Those in an
// arena may still be copied: its count says how many blocks of kReadyBlockBytes are there.
struct Collect {
  uint32_t group = 0;
  uint64_t sequence = 0;  // of the group's collectives, from 1, without gaps
  CollectiveKind kind = CollectiveKind::kBarrier;
  Fold fold = Fold::kNone;  // kNone: bytes pass
  DType dtype = DType::kUInt8;
  uint32_t root = 0;   // rank in the group; 0 without a root
  uint64_t elems = 0;  // of one unit
  uint64_t timeout_ms = 0;
  uint32_t arena = 0;  // 0: none
  std::string values;
  bool operator==(const Collect&) const = default;
};

// Send is a worker's message that it gives values to one other worker of a group. They are in
// `values` or at the beginning of an arena, all of them there already.
struct Send {
  uint32_t group = 0;
  uint64_t call = 0;  // number among the worker's Send and Receive, from 1, without gaps
  uint32_t to = 0;    // rank in the group
  uint64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t timeout_ms = 0;
  uint32_t arena = 0;  // 0: none
  std::string values;
  bool operator==(const Send&) const = default;
};

// Receive is a worker's message that it takes what a worker of the group gives it under a tag: each
// Receive takes one Send, in the order of both.
struct Receive {
  uint32_t group = 0;
  uint64_t call = 0;  // as in Send
  uint32_t from = 0;  // rank in the group; kFromAnyone
  uint64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t timeout_ms = 0;
  bool operator==(const Receive&) const = default;
};
inline constexpr uint32_t kFromAnyone = 0xffff'ffff;

// Collected is the sidecar's message that a worker's collective is done: what the worker gets is in
// `values` or in an arena of the sidecar's. With group 0 it is about a Send or Receive.
struct Collected {
  uint32_t group = 0;
  uint64_t sequence = 0;  // or the call
  uint64_t bytes = 0;
  uint32_t arena = 0;   // 0: in `values`
  uint64_t offset = 0;  // in the arena
  uint32_t from = 0;    // of a Receive: whose values, by rank in the group
  std::string values;
  bool operator==(const Collected&) const = default;
};

// CollectedPart is the sidecar's message that a part of what a Collected will name is there, so
// that the worker can copy it while the rest is under way. Parts do not overlap, need not cover
// all, and come before the Collected.
struct CollectedPart {
  uint32_t group = 0;
  uint64_t sequence = 0;
  uint32_t arena = 0;
  uint64_t offset = 0;  // in the arena, of what the worker gets
  uint64_t begin = 0;   // of the part, in what the worker gets
  uint64_t bytes = 0;   // of the part
  bool operator==(const CollectedPart&) const = default;
};

// Taken is a worker's message that it does not need the arena of a Collected any more.
struct Taken {
  uint32_t group = 0;
  uint64_t sequence = 0;
  bool operator==(const Taken&) const = default;
};

// Values of at most so many bytes travel in the message, without an arena.
inline constexpr uint64_t kMaxInlineBytes = 16 << 10;
// An arena for a collective's values counts what is ready in blocks of this size.
inline constexpr uint64_t kReadyBlockBytes = 256 << 10;
// Parts of a collective's result, if that has at least as many bytes as several of them.
inline constexpr uint64_t kPartBytes = 1 << 20;
inline constexpr uint64_t kFewestParts = 4;

}  // namespace thalweg::ipc
