// ShardDirectory finds the shards of a sidecar's jobs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/job_signer.h"
#include "core/base/mutex.h"
#include "core/exchange/shard.h"
#include "core/ipc/message.h"

namespace thalweg {

// Thread-safe.
class ShardDirectory {
 public:
  // A shard in this process that also serves other nodes.
  struct Hosted {
    Shard* shard = nullptr;  // null: this sidecar hosts none
    std::string address;     // host:port at which other nodes reach it
    // Lets nodes join the job with this identity until the result is released.
    std::function<std::shared_ptr<void>(const std::string& job, const std::string& identity)>
        invite;
  };
  struct Options {
    // Used by jobs that name no shards, in this order; their addresses, if they have any. They must
    // outlive the directory.
    std::vector<Shard*> configured;
    std::vector<std::string> addresses;
    Hosted hosted;
    // Makes a shard that connects to the address at its first call. Null: jobs may only name the
    // hosted shard.
    std::function<std::shared_ptr<Shard>(const std::string& address)> connect;
    // Makes a signer from a job's secret. Null: jobs must not have any.
    std::function<absl::StatusOr<std::shared_ptr<const JobSigner>>(const std::string& secret)>
        make_signer;
    // Wraps a shard for one job, so that the job goes on when the shard forgets it, because it or
    // another node is restarted (ReturningShard). Null: it does not.
    std::function<std::shared_ptr<Shard>(std::shared_ptr<Shard>)> make_returning = nullptr;
    // The configured shards are in this process: the nodes of a job cannot meet there.
    bool are_own = false;
  };
  explicit ShardDirectory(Options options) : options_(std::move(options)) {}

  struct JobShards {
    std::vector<std::shared_ptr<Shard>> shards;  // in order
    std::shared_ptr<const JobSigner> signer;     // null: the job has no secret
    std::shared_ptr<void> invitation;            // of this node to the hosted shard
  };
  // Returns what the job that the worker describes needs, to be held while the job lasts. Its own
  // node's shard is called directly. InvalidArgument: a shard that cannot be had, or a malformed
  // secret. FailedPrecondition: its nodes have none to meet at.
  absl::StatusOr<JobShards> ShardsOf(const ipc::Hello& hello);
  // What this sidecar offers to a job; the caller holds the invitation while nodes may join.
  struct Offer {
    ipc::ShardHosted answer;
    std::shared_ptr<void> invitation;
  };
  absl::StatusOr<Offer> OfferTo(const ipc::HostShard& request);

  // Releases shards that no job uses any more. It may close connections, and must not run on their
  // threads.
  void Prune();

 private:
  absl::StatusOr<std::shared_ptr<const JobSigner>> SignerOf(const std::string& secret) const;
  absl::StatusOr<std::shared_ptr<Shard>> Find(const ShardPlace& place, uint32_t node);
  std::shared_ptr<Shard> Returning(std::shared_ptr<Shard> shard) const;

  const Options options_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<Shard>> by_address_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
