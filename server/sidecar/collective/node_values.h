// What the workers of a node give to a collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/ipc/bucket_arena.h"
#include "server/sidecar/job/job_outcome.h"

namespace thalweg {

// The values of one worker, in its arena or as they came in its message.
class GivenValues {
 public:
  GivenValues(uint32_t local_rank, std::string values, std::shared_ptr<const BucketArena> arena)
      : local_rank_(local_rank), values_(std::move(values)), arena_(std::move(arena)) {}

  const std::byte* data() const {
    return arena_ == nullptr ? reinterpret_cast<const std::byte*>(values_.data())
                             : arena_->payload();
  }
  bool is_inline() const { return arena_ == nullptr; }
  uint32_t local_rank() const { return local_rank_; }  // of the worker
  // Waits until the first `bytes` bytes are there. Returns the job's outcome if it ends before.
  absl::Status Await(uint64_t bytes, const JobOutcome& outcome) const;

 private:
  const uint32_t local_rank_;
  const std::string values_;
  const std::shared_ptr<const BucketArena> arena_;  // shared with the worker's other collectives
};

// What all workers of a node give to a collective. Contributions refer to it, also after the
// collective has its results: shards may still be sending its bytes.
class NodeValues {
 public:
  using OnReleased = std::function<void(uint32_t local_rank)>;
  NodeValues(size_t workers, OnReleased on_released)
      : values_(workers), on_released_(std::move(on_released)) {}
  ~NodeValues();  // from any thread; calls on_released for each worker that has used an arena
  NodeValues(const NodeValues&) = delete;
  NodeValues& operator=(const NodeValues&) = delete;

  std::optional<GivenValues>& operator[](size_t worker) { return values_[worker]; }
  size_t size() const { return values_.size(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::vector<std::optional<GivenValues>> values_;
  const OnReleased on_released_;
};

}  // namespace thalweg
