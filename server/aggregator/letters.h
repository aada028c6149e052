// Letters are messages between a job's nodes, which the shard passes on as they are.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "core/exchange/rounds.h"

namespace thalweg {

// Thread-compatible; what it has returned may be released by any thread.
class Letters {
 public:
  explicit Letters(uint32_t num_nodes) : num_nodes_(num_nodes) {}

  // Says whether the letter of node `node`, called `name`, may pass. InvalidArgument: it goes a way
  // that it cannot go in this epoch, or has more than `chunk_bytes`. ResourceExhausted: too many
  // bytes have not been taken yet.
  absl::Status Check(const std::string& name, uint32_t node, const Contribution& letter,
                     uint64_t epoch, uint64_t chunk_bytes) const;
  // Returns what the letter's node gets. Its bytes count until the payload is released.
  RoundResult Take(Contribution letter) const;

  // From now on there are letters; returns whether there were none before.
  bool Begin() { return !std::exchange(are_used_, true); }
  // Returns the memory that they may take.
  uint64_t max_bytes() const { return are_used_ ? kLetterBytesPerNode * num_nodes_ : 0; }

 private:
  const uint32_t num_nodes_;
  bool are_used_ = false;
  // What those take that have not been sent yet; shared with their payloads.
  const std::shared_ptr<std::atomic<uint64_t>> bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace thalweg
