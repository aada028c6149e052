// ShardReport is a shard's state as plain values: server/aggregator fills it in, server/page
// formats it (docs/api.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/wire_format.h"
#include "core/exchange/link_speed.h"
#include "core/exchange/rounds.h"
#include "core/exchange/shares.h"

namespace thalweg {

// A Volume counts bytes of gradients since the job, or the process, began.
struct Volume {
  double raw_bytes = 0;   // before encoding
  double wire_bytes = 0;  // after encoding
};

// A FormatReport counts contributions in one format.
struct FormatReport {
  WireFormat wire = WireFormat::kFloat32;
  bool factors = false;  // PowerSGD's factors, which represent whole gradients
  Volume received;
};

struct NodeReport {
  enum class State { kMissing, kActive, kLeft };

  std::string name;  // the node's own name; empty while it is missing
  State state = State::kMissing;
  uint32_t workers = 0;
  Duration silent{};           // since its last message; 0 while it is missing
  uint64_t last_rounds = 0;    // rounds of several nodes in which it was the last
  Duration waited{};           // in those rounds, from the last but one contribution to its own
  uint64_t reconnections = 0;  // of its connections that have broken
};

// A WaitingReport describes the round that has been open for longest.
struct WaitingReport {
  RoundId round;
  Duration open{};
  std::vector<uint32_t> missing;  // missing nodes
};

// A PlacementReport says what the job's first shard has chosen for all.
struct PlacementReport {
  std::vector<uint32_t> shares;  // as in Terms, as is the forecast
  ShareForecast forecast;
  std::string text;  // all of that for people
};

struct JobReport {
  enum class State { kGathering, kRunning, kFailed };

  std::string name;
  std::string identity;  // in hexadecimal; empty: the job has no secret
  State state = State::kGathering;
  std::string failure;  // set with kFailed
  Duration age{};       // since its first node joined
  std::string codec;    // the policy as text
  uint32_t world_size = 0;
  uint32_t shard = 0;
  uint32_t num_shards = 0;
  uint64_t chunk_bytes = 0;  // this and the next are 0 while the job gathers
  uint32_t window_chunks = 0;
  LinkSpeed link;  // the slowest link
  // Only on the job's first shard, and not while the job gathers or if this shard has a weight.
  std::optional<PlacementReport> placement;
  Duration round_timeout{};

  uint64_t contributions = 0;
  uint64_t repeated_contributions = 0;
  uint64_t rounds_completed = 0;
  uint64_t rounds_lost = 0;
  uint64_t open_rounds = 0;
  uint64_t nonfinite_elems = 0;
  uint64_t held_bytes = 0;
  uint64_t residual_bytes = 0;
  uint64_t memory_reserved_bytes = 0;
  Duration wait_time{};  // from the first contribution to the last, over all rounds
  Duration fold_time{};
  Duration update_time{};  // of weights that the shard keeps
  Volume received;
  Volume sent;
  std::vector<FormatReport> formats;
  std::vector<NodeReport> nodes;  // by node number
  std::optional<WaitingReport> waiting;
};

struct FaultReport {
  std::string job;
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string message;
  bool refused = false;  // true: a node was not admitted; false: the job has failed
  uint64_t rounds_lost = 0;
  Duration ago{};
};

// A ReasonReport counts failures and refusals with one reason since the process began.
struct ReasonReport {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  uint64_t jobs_failed = 0;
  uint64_t nodes_refused = 0;
  uint64_t rounds_lost = 0;
};

struct ShardReport {
  Duration uptime{};
  uint32_t weight = 0;  // 0: none is set
  bool draining = false;
  uint64_t contributions = 0;
  uint64_t repeated_contributions = 0;
  uint64_t rounds_completed = 0;
  uint64_t nonfinite_elems = 0;
  uint64_t held_bytes = 0;
  uint64_t residual_bytes = 0;
  uint64_t memory_budget_bytes = 0;    // that all jobs may reserve together
  uint64_t memory_reserved_bytes = 0;  // that they have reserved
  Duration fold_time{};
  Volume received;
  Volume sent;
  std::vector<ReasonReport> reasons;
  std::vector<FaultReport> faults;  // latest first; limited in number
  std::vector<JobReport> jobs;      // jobs that have members, by name and identity
};

}  // namespace thalweg
