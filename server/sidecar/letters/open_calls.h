// OpenCalls are the sends and receives that a node's workers wait for.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "core/base/clock.h"

namespace thalweg {

// Thread-compatible.
class OpenCalls {
 public:
  using Id = std::pair<uint32_t, uint64_t>;  // local rank and call
  struct Call {
    std::string what;
    TimePoint since;
    Duration timeout{};
    // The call waits for this worker, by local rank; nothing if it is on another node, or any.
    std::optional<uint32_t> awaited = std::nullopt;
    bool has_met = false;  // the other side is there
  };

  void Add(const Id& id, Call call) { calls_[id] = std::move(call); }
  void End(const Id& id) { calls_.erase(id); }
  // Bytes of the call's message have moved: its timeout begins anew.
  void NoteProgress(const Id& id, TimePoint now);
  std::string WhatOf(const Id& id) const;
  bool empty() const { return calls_.empty(); }

  // Both return Aborted when a call waits for a worker that has left.
  absl::Status NoteLeft(uint32_t local_rank, const std::string& name);
  absl::Status CheckAwaited(const Id& id) const;
  // Returns DeadlineExceeded when one has waited longer than its timeout: for the other side, or
  // for further bytes. Before `awake_since` this process did not run.
  absl::Status CheckLate(TimePoint now, TimePoint awake_since) const;

 private:
  std::map<Id, Call> calls_;
  std::map<uint32_t, std::string> left_;  // names, by local rank
};

}  // namespace thalweg
