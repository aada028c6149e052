#include "server/round/same_job.h"

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/plan/link_rates.h"

namespace thalweg {
namespace {

// Returns the nodes that host the job's shards, e.g. "'0, 1, none'".
std::string HostsText(const JoinRequest& request) {
  const auto append = [](std::string* text, uint32_t host) {
    if (host == kNoHost) {
      absl::StrAppend(text, "none");
    } else {
      absl::StrAppend(text, host);
    }
  };
  return absl::StrCat("'", absl::StrJoin(HostsOf(request), ", ", append), "'");
}

std::string LossesText(const Losses& losses) {
  return absl::StrCat(losses.min_nodes, " after ", ToSeconds(losses.grace), " s");
}

// A node of this process says parts of a millisecond, too; the wire carries none.
int64_t InMs(Duration time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
}

}  // namespace

absl::Status CheckSameJob(const JoinRequest& first, const JoinRequest& request) {
  const JoinRequest& r = request;
  const auto differs = [&](const char* what, const auto& theirs, const auto& ours) {
    return absl::InvalidArgumentError(absl::StrCat("node ", r.node, " (", r.node_name, ") says ",
                                                   what, " is ", theirs, ", node ", first.node,
                                                   " (", first.node_name, ") says ", ours));
  };
  if (r.resume.has_value() != first.resume.has_value()) {
    const auto when = [](const JoinRequest& each) {
      return each.resume.has_value() ? "before this aggregator was restarted" : "now";
    };
    return differs("the job's beginning", when(r), when(first));
  }
  if (r.num_nodes != first.num_nodes) {
    return differs("the number of nodes", r.num_nodes, first.num_nodes);
  }
  if (r.world_size != first.world_size) {
    return differs("the world size", r.world_size, first.world_size);
  }
  if (r.num_shards != first.num_shards) {
    return differs("the number of aggregators", r.num_shards, first.num_shards);
  }
  if (r.shard != first.shard) {
    return differs("this aggregator's place in the list of aggregators", r.shard, first.shard);
  }
  if (HostsOf(r) != HostsOf(first)) {
    return differs("the list of nodes that host the shards", HostsText(r), HostsText(first));
  }
  if (r.chunk_bytes != first.chunk_bytes) {
    return differs("the chunk size in bytes", r.chunk_bytes, first.chunk_bytes);
  }
  if (r.window_chunks != first.window_chunks) {
    return differs("the window in chunks", r.window_chunks, first.window_chunks);
  }
  if (InMs(r.round_timeout) != InMs(first.round_timeout)) {
    return differs("the timeout of a round in ms", InMs(r.round_timeout),
                   InMs(first.round_timeout));
  }
  if (r.costs.size() != first.costs.size()) {
    return differs("the number of codecs with a cost", r.costs.size(), first.costs.size());
  }
  if (r.losses != first.losses) {
    return differs("the number of nodes that it goes on with", LossesText(r.losses),
                   LossesText(first.losses));
  }
  if (r.codec != first.codec) {
    return differs("the codec", r.codec.ToString(), first.codec.ToString());
  }
  return absl::OkStatus();
}

}  // namespace thalweg
