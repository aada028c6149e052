// What a shard tells those who watch it, as plain values: server/aggregator fills it in,
// server/page writes it down (docs/api.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/exchange.h"
#include "core/base/wire_format.h"

namespace thalweg {

// Bytes of gradients since the job, or the process, began.
struct Volume {
  double raw_bytes = 0;   // before encoding
  double wire_bytes = 0;  // after it
};

// What contributions were sent as.
struct FormatReport {
  WireFormat wire = WireFormat::kFloat32;
  bool factors = false;  // PowerSGD's, that stand for whole gradients
  Volume received;
};

struct NodeReport {
  enum class State { kMissing, kActive, kLeft };

  std::string name;  // as the node calls itself; empty while it is missing
  State state = State::kMissing;
  uint32_t workers = 0;
  Duration silent{};         // since it was last heard of; 0 while it is missing
  uint64_t last_rounds = 0;  // rounds in which it was the last of several nodes
  Duration waited{};         // in these, from the last but one contribution to its own
};

// The round that has been open for longest.
struct WaitingReport {
  RoundId round;
  Duration open{};
  std::vector<uint32_t> missing;  // nodes
};

struct JobReport {
  enum class State { kGathering, kRunning, kFailed };

  std::string name;
  State state = State::kGathering;
  std::string failure;  // with kFailed
  Duration age{};       // since its first node came
  std::string codec;    // the policy's text
  uint32_t world_size = 0;
  uint32_t shard = 0;
  uint32_t num_shards = 0;
  uint64_t chunk_bytes = 0;  // these two: 0 while it gathers
  uint32_t window_chunks = 0;
  LinkSpeed link;  // the slowest
  Duration round_timeout{};

  uint64_t contributions = 0;
  uint64_t repeated_contributions = 0;
  uint64_t rounds_completed = 0;
  uint64_t rounds_lost = 0;
  uint64_t open_rounds = 0;
  uint64_t nonfinite_elems = 0;
  uint64_t held_bytes = 0;
  uint64_t residual_bytes = 0;
  Duration wait_time{};  // of rounds, from the first contribution to the last
  Duration fold_time{};
  Volume received;
  Volume sent;
  std::vector<FormatReport> formats;
  std::vector<NodeReport> nodes;  // by number
  std::optional<WaitingReport> waiting;
};

struct FaultReport {
  std::string job;
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string message;
  bool refused = false;  // a node was not admitted; else the job has failed
  uint64_t rounds_lost = 0;
  Duration ago{};
};

// How often there was that reason, since the process began.
struct ReasonReport {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  uint64_t jobs_failed = 0;
  uint64_t nodes_refused = 0;
  uint64_t rounds_lost = 0;
};

struct ShardReport {
  Duration uptime{};
  uint32_t weight = 1;
  bool draining = false;
  uint64_t contributions = 0;
  uint64_t repeated_contributions = 0;
  uint64_t rounds_completed = 0;
  uint64_t nonfinite_elems = 0;
  uint64_t held_bytes = 0;
  uint64_t residual_bytes = 0;
  Duration fold_time{};
  Volume received;
  Volume sent;
  std::vector<ReasonReport> reasons;
  std::vector<FaultReport> faults;  // the latest first; not all of them
  std::vector<JobReport> jobs;      // those that have members, by name
};

}  // namespace thalweg
