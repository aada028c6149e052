// Events are what a shard tells its members.
#pragma once

#include "absl/status/status.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// A MemberEvents receives what a shard tells one member. Calls come from any thread, also
// concurrently, and must neither block nor call back into the shard.
class MemberEvents {
 public:
  virtual ~MemberEvents() = default;
  virtual void OnResult(RoundResult result) = 0;
  // Reports that the job has failed: `why` names job, bucket, round and the missing nodes. NotFound
  // means instead that the shard does not know the membership: it has been restarted. It is the
  // last call made, and may come before Join has returned.
  virtual void OnFailed(absl::Status why) = 0;
};

}  // namespace thalweg
