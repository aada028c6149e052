// What a node says when it joins a job on a shard, and what it is told.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/codec_cost.h"
#include "core/base/codec_policy.h"
#include "core/base/job_signer.h"
#include "core/base/shard_place.h"
#include "core/base/tenant.h"
#include "core/exchange/link_speed.h"
#include "core/exchange/rounds.h"
#include "core/exchange/shares.h"

namespace thalweg {

// Losses say whether a job goes on when a node is lost: its rounds then give the mean over those
// that are left. All nodes say the same, and a node that was lost cannot return.
struct Losses {
  uint32_t min_nodes = 0;  // so many must be left; 0: the job needs all
  Duration grace{};        // a node is lost that has been silent for this and an interval

  bool operator==(const Losses&) const = default;
};

// A JoinRequest describes the node and its job. Everything except the first three fields, the link,
// the costs, the rates, the grace and the rounds must be the same on all nodes of a job; and either
// all of them resume the job or none does.
//
// Job and identity together name the job on a shard: whoever does not know its secret can only name
// another one.
struct JoinRequest {
  uint32_t node = 0;      // 0 … num_nodes-1
  std::string node_name;  // for people: host name and process
  uint32_t workers = 0;   // number of this node's workers
  std::string job;
  uint32_t num_nodes = 0;
  uint32_t world_size = 0;  // workers of all nodes together
  uint32_t shard = 0;       // number of this shard in the job, as the caller has it
  uint32_t num_shards = 0;
  uint64_t chunk_bytes = 0;    // ChunkPlan::For's argument; 0: the shard chooses
  uint32_t window_chunks = 0;  // 0: the shard chooses
  CodecPolicy codec;
  Duration round_timeout{};  // how long a round waits for its last contribution
  LinkSpeed link;            // as measured by this node
  // Costs of what auto chooses from, as measured by this node; all nodes give equally many.
  std::vector<CodecCost> costs;
  // By shard: the node that hosts it, or kNoHost. A node hosts at most one. Empty: none is hosted.
  std::vector<uint32_t> hosts;
  // By shard, only for the job's first one: the rate in bytes per second at which this node could
  // send to it; 0: not measured. Empty: none is measured.
  std::vector<double> shard_rates;
  // The public key that belongs to the job's secret; empty: the job has none. A caller in the same
  // process is believed, one on another machine must prove that it knows the secret.
  std::string identity;
  // Proves the identity to a RemoteShard's other end. It never leaves the process.
  std::shared_ptr<const JobSigner> signer;
  // What the transport knows of a caller on another machine. A caller in the same process has none
  // and is believed.
  std::optional<PeerNames> peer;
  // Where the caller on another machine is: callers at one place share what is scarce. Empty: it is
  // in this process, and shares nothing.
  std::string place = {};
  // How long a connection of this node may be away and come back; its lease covers that.
  Duration grace{};
  Losses losses = {};
  // Ends the waits of a call to a RemoteShard early, which then returns Cancelled. It never leaves
  // the process.
  std::stop_token stop = {};
  // Set when the job has begun on this shard and the shard has forgotten it: the last rounds whose
  // results this node has, 0 for chunks that other shards sum. At most kMaxResumedChunks numbers.
  // chunk_bytes and window_chunks are then what the shard answered at first.
  std::optional<std::vector<BucketRounds>> resume = std::nullopt;
};

// Terms are what a job's nodes and one of its shards have agreed on, for as long as the membership
// lasts.
struct Terms {
  uint64_t epoch = 0;
  uint64_t chunk_bytes = 0;
  // The node may have at most this many contributed chunks without a result.
  uint32_t window_chunks = 0;
  // If any shard of the job has a weight, each sums a part of the gradients in proportion to its
  // weight, and 0 counts as 1. Otherwise the first shard's `shares` decide.
  uint32_t weight = 0;
  // The slowest link of all nodes that have a network in between, and the largest of each cost.
  LinkSpeed link = {};
  std::vector<CodecCost> costs = {};
  // By shard, only from the job's first one: its part of the gradients in units of 1/kShareTotal,
  // chosen for the rates of the links, and what that predicts.
  std::vector<uint32_t> shares = {};
  ShareForecast forecast = {};
  bool resumed = false;  // as the request has asked for
  Losses losses = {};    // the same
  // The results that this node must Supply, because others lack them.
  std::vector<BucketRounds> wanted = {};
};

// A KeptSeat is what is left of a node's place on a shard when the node's process has died: what it
// was told when it joined, the buckets that it announced, and the last results that it got.
struct KeptSeat {
  Terms agreed;
  std::vector<BucketAnnouncement> buckets;
  std::vector<RoundResult> results;  // of each chunk at most one
};

}  // namespace thalweg
