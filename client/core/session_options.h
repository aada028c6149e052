// What a worker says of itself and its job when it connects a Session.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/codec_policy.h"
#include "core/base/shard_place.h"
#include "core/base/trace.h"
#include "core/device/device_runtime.h"

namespace thalweg {

struct SessionOptions {
  std::string sidecar_path;  // Unix socket
  std::string job;           // unique among the jobs that the sidecar and the aggregators serve
  uint32_t rank = 0;         // this worker's rank in the job
  uint32_t world_size = 1;
  uint32_t node = 0;  // this node's number in the job; gives the order of summation
  uint32_t num_nodes = 1;
  std::string node_name;
  uint32_t local_rank = 0;  // number among this node's workers; gives the order of summation
  uint32_t local_size = 1;
  CodecPolicy codec;
  uint64_t chunk_bytes = 0;  // 0: chosen from the speed of the links
  // Limit of every wait for a process that shows no sign of life.
  Duration timeout = std::chrono::seconds(30);
  // Limit of a round's wait for workers that are alive, but do not come to it; 0: `timeout`.
  Duration step_timeout{};
  // How long a sidecar may be away and come back as a new process; 0: its end ends the session.
  Duration reconnect{};
  // The job goes on when nodes are lost, as long as so many are left: results are then the mean
  // over their workers. 0: the job needs all. A node is lost that has been silent for `loss_grace`
  // and an interval of heartbeats. Nodes that host a shard cannot be lost.
  uint32_t min_nodes = 0;
  Duration loss_grace{};
  // The job's shards in order, equal on all nodes; empty: those that the sidecar is configured
  // with.
  std::vector<ShardPlace> shards = {};
  std::string secret = {};  // of the job, as 64 hexadecimal digits; empty: it has none
  // The device that holds the gradients; null: the host's memory. Queued work shares its ownership.
  std::shared_ptr<DeviceRuntime> device = nullptr;
  // Called when too little of its memory is left: frees what the process only keeps for later. May
  // be null.
  std::function<void()> free_device_memory = nullptr;
  std::shared_ptr<TraceWriter> trace = nullptr;  // nothing is traced when null
};

inline Duration StepTimeout(const SessionOptions& options) {
  return options.step_timeout > Duration::zero() ? options.step_timeout : options.timeout;
}

}  // namespace thalweg
