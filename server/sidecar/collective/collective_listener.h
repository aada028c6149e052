// What collectives and messages between workers tell their job.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "core/ipc/message.h"

namespace thalweg {

// Calls come from any thread and without a lock.
class CollectiveListener {
 public:
  virtual ~CollectiveListener() = default;
  // Posts a message to a worker; see Roster::Tell.
  virtual void OnMessage(uint32_t local_rank, const ipc::Message& message, int fd) = 0;
  virtual void OnCollectiveFailed(const absl::Status& why) = 0;
  // Returns a function that does what OnMessage does, and may be called after the job is gone.
  virtual std::function<void(uint32_t, const ipc::Message&)> Poster() = 0;
};

}  // namespace thalweg
