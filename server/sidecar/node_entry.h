// NodeEntry takes a job to its shards once the node's workers are here: it joins them, or takes up
// what an earlier process of the sidecar had there. Then workers announce buckets.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/job_signer.h"
#include "core/base/shard_place.h"
#include "core/exchange/events.h"
#include "core/exchange/join.h"
#include "core/ipc/message.h"
#include "server/shards/shard_group.h"
#include "server/sidecar/bucket/bucket_table.h"
#include "server/sidecar/bucket/job_compression.h"
#include "server/sidecar/bucket/kept_buckets.h"
#include "server/sidecar/job/node_context.h"
#include "server/sidecar/watchdog.h"
#include "server/sidecar/workers/roster.h"

namespace thalweg {

// Returns the node that hosts each shard.
std::vector<uint32_t> HostsOf(const std::vector<ShardPlace>& shards);

// Tells a worker that a bucket is registered; the node's first one also gets the codecs' memory.
void TellReady(Roster& roster, uint32_t local_rank, NodeBucket& bucket);

// Thread-compatible; used once.
class NodeEntry {
 public:
  // All must outlive the entry.
  struct Parts {
    const ipc::Hello& spec;  // of the worker that came first
    const Patience& patience;
    NodeContext& context;
    const std::shared_ptr<const JobSigner>& signer;
    ShardGroup& shards;
    JobCompression& compression;
    BucketTable& buckets;
    KeptBuckets& kept;
    Roster& roster;
  };
  using EventsOf = std::function<std::shared_ptr<MemberEvents>(uint32_t shard)>;
  NodeEntry(const Parts& parts, EventsOf events_of)
      : parts_(parts), events_of_(std::move(events_of)) {}

  // Requires that all workers have come, and welcomes them. Errors are those of ShardGroup::Join
  // and TakeUp; FailedPrecondition: what the job carries from round to round has died with the
  // earlier process.
  absl::Status Enter(TimePoint deadline);

 private:
  absl::Status Join(TimePoint deadline);
  absl::Status TakeUp(const ipc::JobTerms& known, TimePoint deadline);
  JoinRequest MakeRequest() const;
  void OpenBuckets(uint64_t chunk_bytes);
  void Welcome(uint64_t chunk_bytes, ipc::JobTerms terms, std::string placement);

  const Parts parts_;
  const EventsOf events_of_;
};

}  // namespace thalweg
