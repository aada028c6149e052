// ServedShard is a Shard that a server can offer to many nodes without a thread for each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/exchange/shard.h"

namespace thalweg {

// A ServedNode is a node as the shard that serves it sees it.
class ServedNode : public MemberEvents {
 public:
  // Returns how many results OnResult has taken whose sending has not begun.
  virtual uint32_t Backlog() const { return 0; }
  // Kept says what is kept of the results that OnResult has taken, because a stream of the node may
  // break and must then send them again.
  struct Kept {
    uint32_t streams = 1;  // that the node has
    // How many results the node has not acknowledged on one of them. Letters do not count.
    uint64_t results = 0;
  };
  // `results` are those on the stream of this chunk.
  virtual Kept KeptResults(uint32_t /*chunk*/) const { return {}; }
  // Returns how many times a connection to the node has broken and come back.
  virtual uint64_t Reconnections() const { return 0; }
};

// A ServedShard is thread-safe. Its calls return without waiting for nodes, all but Join.
class ServedShard : public Shard {
 public:
  using Joined = std::function<void(absl::StatusOr<std::unique_ptr<Member>>)>;
  // Gives up the wait for the other nodes, for a reason that is not OK and that Joined then gets.
  // After Joined it ends the membership, as Member::Leave does.
  using GiveUp = std::function<void(const absl::Status& reason)>;

  // Begins what Join waits for and returns at once. `joined` gets Join's result, once: from any
  // thread, also before BeginJoin returns, at the latest when `deadline` has passed, and with no
  // lock held. It must not block. The result is null if the node has been refused.
  virtual GiveUp BeginJoin(const JoinRequest& request, std::shared_ptr<ServedNode> node,
                           TimePoint deadline, Joined joined) = 0;
  // Says whether calls for a membership must come from a peer with the PeerNames::Principal of the
  // one that has joined: the shard has a policy, by which it has let the node in.
  virtual bool HasPolicy() const { return false; }

  // Waits for BeginJoin's result.
  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request,
                                               std::shared_ptr<MemberEvents> events,
                                               TimePoint deadline) final;
};

}  // namespace thalweg
