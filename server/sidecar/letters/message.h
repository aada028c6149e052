// The two ends of a message from one worker to another.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/clock.h"
#include "core/base/payload.h"
#include "core/ipc/message.h"
#include "server/sidecar/collective/arenas.h"
#include "server/sidecar/collective/node_values.h"

namespace thalweg {

// A Sending is a message that a worker of this node sends. Only its PostOffice changes it.
struct Sending {
  uint32_t local_rank = 0;
  ipc::Send call;                      // without values
  uint32_t from = 0;                   // rank of the worker
  std::shared_ptr<NodeValues> values;  // of this worker alone
  uint32_t node = 0;                   // of the receiver
  uint64_t gone = 0;                   // bytes that have been written
  bool is_done = false;                // the worker knows
};

// An Offer is a message as the receiver's node knows it before it is received.
struct Offer {
  uint32_t from = 0;  // rank in the group
  uint64_t tag = 0;
  uint64_t bytes = 0;
  uint32_t node = 0;               // of the sender
  uint64_t message = 0;            // see Letter
  Payload body;                    // if it has come with the offer
  std::shared_ptr<Sending> local;  // on the receiver's own node, in place of the two above
};

// A Receiving is a message that a worker of this node wants, or gets. Only its PostOffice changes
// it.
struct Receiving {
  uint32_t local_rank = 0;
  ipc::Receive call;
  uint32_t to = 0;                     // rank of the worker
  std::shared_ptr<ResultArena> arena;  // for what is too long for `values`
  std::string values;
  Offer offer;            // once it is matched
  uint64_t wanted = 0;    // bytes that the sender has been asked for
  uint64_t come = 0;      // bytes that are here
  uint64_t received = 0;  // bytes that have been copied

  bool Takes(const Offer& other) const {
    return call.tag == other.tag && (call.from == ipc::kFromAnyone || call.from == other.from);
  }
  std::byte* data() {
    return arena == nullptr ? reinterpret_cast<std::byte*>(values.data()) : arena->arena.payload();
  }
};

}  // namespace thalweg
