// ServedShard is a Shard that a server can offer to many nodes without a thread for each.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "core/base/exchange.h"

namespace thalweg {

// A ServedShard is thread-safe. Its calls return without waiting for nodes, all but Join.
class ServedShard : public Shard {
 public:
  using Joined = std::function<void(absl::StatusOr<Membership>)>;

  // Begins what Join waits for and returns at once. `joined` gets Join's result, once: from any
  // thread, also before BeginJoin returns, at the latest when `deadline` has passed, and with no
  // lock held. It must not block. Returns the token with which Leave gives up the wait, for a
  // reason that is not OK: `joined` then gets it. Returns 0 if the node has been refused.
  virtual SessionToken BeginJoin(const JoinRequest& request, TimePoint deadline, Joined joined) = 0;

  // Waits for BeginJoin's result.
  absl::StatusOr<Membership> Join(const JoinRequest& request, TimePoint deadline) final;
};

}  // namespace thalweg
