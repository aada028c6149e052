// The workers of a job on this node: who is here, who has left, and how to speak to them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/ipc/connection.h"
#include "core/ipc/message.h"
#include "server/sidecar/job/job_outcome.h"
#include "server/sidecar/job/node_context.h"
#include "server/sidecar/workers/outbox.h"

namespace thalweg {

// Thread-safe. A worker is known by its local rank, below the first Hello's local_size, and never
// comes back after it has left.
class Roster {
 public:
  // `first` is the Hello of the worker that came first. `on_stuck` is called without a lock, with
  // an error that names the worker, when one does not read its messages. `metrics` and `outcome`
  // must outlive the roster; whoever changes the outcome calls Wake.
  Roster(const ipc::Hello& first, SidecarMetrics& metrics, const JobOutcome& outcome,
         std::function<void(const absl::Status&)> on_stuck);

  // InvalidArgument names the first thing that the worker says differently from the first one.
  absl::Status CheckSameJob(const ipc::Hello& hello) const;
  // Takes a worker of the same job in. `shares_gpu`: OK, or why the sidecar cannot work on its
  // GPU's memory. AlreadyExists: there is a worker with its rank or local rank. Returns the
  // outcome's error when the job has ended: nobody else would tell the worker.
  absl::Status Admit(const ipc::Hello& hello, std::shared_ptr<Connection> connection,
                     const absl::Status& shares_gpu);
  // Waits until all workers are here. Returns the outcome's error when the job ends before.
  absl::Status Gather();
  bool has_gathered() const;
  // DeadlineExceeded, with the numbers of workers, when some have not come within `timeout`.
  absl::Status CheckGathered(Duration waited, Duration timeout) const;
  // The worker has sent a message, be it only a sign of life.
  void Heard(uint32_t local_rank, TimePoint now);
  // Returns those of `local_ranks` that have sent nothing since then.
  std::vector<uint32_t> SilentOnes(const std::vector<uint32_t>& local_ranks, TimePoint since) const;
  // Returns the names of all that have come, have not left and have sent nothing since then.
  std::string SilentNames(TimePoint since) const;
  void Wake();

  // Returns whether the sidecar can work on the memory of all workers' GPUs: their gradients then
  // take path kIpc, and otherwise the path that each asked for. Logs this for each worker. Requires
  // that all have come.
  bool ChoosePaths();
  GradientPath first_path() const;

  struct Departure {
    bool was_last = false;  // all workers of the node have come and left
    absl::Status failure;   // why the job cannot go on, by the leave alone
  };
  // The worker is gone, with OK when it said so itself.
  Departure Leave(uint32_t local_rank, const absl::Status& reason);
  // Returns whether all workers that came have left and no others can come, because all have come
  // or the job has failed.
  bool IsOver() const;

  std::string NameOf(uint32_t local_rank) const;  // "rank 3"
  std::string NamesOf(const std::vector<uint32_t>& local_ranks) const;

  // All post to outboxes. TellAll leaves out those that have left.
  void Tell(uint32_t local_rank, const ipc::Message& message, int fd = -1);
  void TellAll(const ipc::Message& message);
  void Welcome(ipc::Welcome message);  // with each worker's path
  // Tells all of a lost node. Returns false, and tells nobody, if they have been told of it, or
  // have not been welcomed yet: nothing may come before that.
  bool TellLost(const ipc::Lost& lost);
  // Waits until what has been posted to the worker is sent, or until `deadline`.
  void Flush(uint32_t local_rank, TimePoint deadline);
  // Does so for all workers, then drops what is left and ends the outboxes' threads.
  void Close(TimePoint deadline);

 private:
  struct Worker {
    std::shared_ptr<Outbox> outbox;  // null: not here yet; shared with whoever posts
    uint32_t rank = 0;
    GradientPath path = GradientPath::kCpu;
    absl::Status shares_gpu;
    bool has_left = false;
    TimePoint last_heard;
  };
  absl::Status CheckSameSecrets(const ipc::Hello& hello) const;
  absl::Status CheckSeatLocked(const ipc::Hello& hello) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Outbox> OutboxOf(uint32_t local_rank) const;
  std::vector<std::shared_ptr<Outbox>> Outboxes(bool with_left) const;

  const ipc::Hello first_;
  SidecarMetrics& metrics_;
  const JobOutcome& outcome_;
  const std::function<void(const absl::Status&)> on_stuck_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Worker> workers_ ABSL_GUARDED_BY(mutex_);  // by local rank
  uint32_t num_here_ ABSL_GUARDED_BY(mutex_) = 0;        // have come
  uint32_t num_left_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_gathered_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_welcomed_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<std::string> lost_ ABSL_GUARDED_BY(mutex_);  // nodes of which they have been told
};

}  // namespace thalweg
