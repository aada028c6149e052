// TestJob is a job on one shard that runs without threads: sinks are called within Contribute.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "kernels/codec/lossy_reference.h"
#include "server/aggregator/job.h"

namespace thalweg {

struct ListSink : ServedNode {
  void OnResult(RoundResult result) override { results.push_back(std::move(result)); }
  void OnFailed(absl::Status why) override { failures.push_back(std::move(why)); }
  uint64_t Reconnections() const override { return reconnections; }
  Kept KeptResults(uint32_t /*chunk*/) const override { return kept; }
  std::vector<RoundResult> results;
  std::vector<absl::Status> failures;
  uint64_t reconnections = 0;
  Kept kept;
};

inline Bytes BytesOf(const Payload& payload) {
  Bytes bytes;
  for (const auto& piece : payload.pieces) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

using Floats = std::vector<float>;

// These write and read values in float32.
inline Bytes EncodedFloats(const Floats& values) {
  Bytes bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
inline Floats DecodedFloats(const Payload& payload) {
  const Bytes bytes = BytesOf(payload);
  Floats values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Returns what a node of the job is told that waits no longer.
inline absl::StatusOr<Terms> TermsOf(Job& job) {
  absl::StatusOr<Terms> answer = absl::InternalError("WhenComplete did not answer");
  job.WhenComplete(Now(), [&answer](const absl::StatusOr<Terms>& terms) { answer = terms; });
  return answer;
}

// Returns the request of a node with one worker to a job's only shard.
inline JoinRequest RequestOf(uint32_t node, uint32_t num_nodes) {
  JoinRequest request;
  request.job = "job";
  request.node = node;
  request.node_name = absl::StrCat("host", node);
  request.workers = 1;
  request.num_nodes = num_nodes;
  request.world_size = num_nodes;
  request.num_shards = 1;
  return request;
}

// Returns what a job of so many nodes, and one shard, reserves for itself.
inline uint64_t OwnBytes(size_t num_nodes) {
  JoinRequest request;
  request.num_nodes = static_cast<uint32_t>(num_nodes);
  request.num_shards = 1;
  return JobMemory::OwnBytes(request);
}

// `memory_bytes` are beside those. Chunks have kMinChunkBytes, counted as the format counts them.
// Node k has workers[k] workers. With `rounds`, by node, the nodes resume the job. With
// `snapshots`, which must outlive it, it has an identity, and all that have one have the same.
class TestJob {
 public:
  using Rounds = std::vector<BucketRounds>;
  static constexpr uint64_t kPlenty = 1 << 30;

  explicit TestJob(std::vector<uint32_t> workers, uint64_t memory_bytes = kPlenty,
                   const std::vector<Rounds>& rounds = {}, SnapshotWriter* snapshots = nullptr)
      : workers_(std::move(workers)),
        memory_(memory_bytes + OwnBytes(workers_.size()), metrics_.memory_reserved_bytes) {
    JoinRequest request;
    request.job = "job";
    request.num_nodes = static_cast<uint32_t>(workers_.size());
    for (uint32_t count : workers_) request.world_size += count;
    request.num_shards = 1;
    request.chunk_bytes = kMinChunkBytes;
    request.window_chunks = 64;
    request.round_timeout = std::chrono::seconds(30);
    if (!rounds.empty()) request.resume = rounds[0];
    if (snapshots != nullptr) request.identity = std::string(32, 'k');
    job_ = std::make_unique<Job>(request, 64, memory_, metrics_, faults_, nullptr, snapshots);
    for (uint32_t node = 0; node < workers_.size(); ++node) {
      request.node = node;
      request.node_name = absl::StrCat("host", node);
      request.workers = workers_[node];
      if (!rounds.empty()) request.resume = rounds[node];
      sinks_.push_back(std::make_shared<ListSink>());
      EXPECT_TRUE(job_->AddMember(request, sinks_.back(), Now()).ok());
    }
    EXPECT_TRUE(TermsOf(*job_).ok());
  }

  // Announces, for all nodes, a bucket of `elems` float32 elements to be sent in `wire`.
  void Register(BucketId id, uint64_t elems, WireFormat wire, uint64_t raw_bytes = 0) {
    const BucketLayout layout{DType::kFloat32, {{"w", {static_cast<int64_t>(elems)}}}};
    for (uint32_t node = 0; node < workers_.size(); ++node) {
      ASSERT_TRUE(job_->RegisterBucket(node, {id, layout, wire, 0, raw_bytes}).ok());
    }
  }

  absl::Status Contribute(uint32_t node, RoundId id, WireFormat wire, uint64_t elems,
                          const Bytes& bytes, double loss_scale = kUnknownLossScale) {
    return job_->Contribute(node, {id, 1, wire, elems, Split(bytes, {}), loss_scale}, Now());
  }

  double Metric(const char* gauge) { return registry_.GetGauge(gauge, "").Value(); }
  double ResidualBytes() { return Metric("thalweg_shard_residual_bytes"); }
  double HeldBytes() { return Metric("thalweg_shard_held_bytes"); }
  double NonFinite() {
    return registry_.GetCounter("thalweg_shard_nonfinite_elements_total", "").Value();
  }

  Job& job() { return *job_; }
  MetricRegistry& registry() { return registry_; }
  ListSink& sink(uint32_t node) { return *sinks_[node]; }
  const std::vector<uint32_t>& workers() const { return workers_; }

 private:
  const std::vector<uint32_t> workers_;
  MetricRegistry registry_;
  ShardMetrics metrics_{registry_};
  MemoryBudget memory_;
  FaultLog faults_;
  std::unique_ptr<Job> job_;
  std::vector<std::shared_ptr<ListSink>> sinks_;
};

}  // namespace thalweg
