// A ShardOffer is a sidecar's offer to serve a shard to the nodes of a job.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/core/fork_guard.h"
#include "core/base/clock.h"
#include "core/ipc/connection.h"

namespace thalweg {

// The sidecar admits the job's nodes while this object lives, or until the job has begun.
class ShardOffer {
 public:
  // Asks the sidecar at `sidecar_path`. `secret` is the job's, as in SessionOptions. Errors are
  // those of Session::Connect.
  static absl::StatusOr<std::unique_ptr<ShardOffer>> Ask(const std::string& sidecar_path,
                                                         const std::string& job,
                                                         const std::string& secret,
                                                         Duration timeout);

  // host:port at which other nodes reach the shard; empty: the sidecar hosts none.
  const std::string& address() const { return answer_.address; }
  // The aggregators that the sidecar is configured with.
  const std::vector<std::string>& aggregators() const { return answer_.aggregators; }
  // Ends the offer. Idempotent.
  void Close() { connection_->Shutdown(); }

 private:
  ShardOffer(std::unique_ptr<Connection> connection, ipc::ShardHosted answer)
      : connection_(std::move(connection)),
        answer_(std::move(answer)),
        fork_guard_([this] { connection_->CloseInChild(); }) {}

  const std::unique_ptr<Connection> connection_;
  const ipc::ShardHosted answer_;
  const ForkGuard fork_guard_;
};

}  // namespace thalweg
