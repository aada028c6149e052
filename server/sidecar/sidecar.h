// Sidecar is a node's sidecar: it accepts connections of the node's workers and runs their jobs.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/base/trace.h"
#include "core/ipc/connection.h"
#include "core/ipc/listener.h"
#include "server/base/metrics.h"
#include "server/sidecar/device/device.h"
#include "server/sidecar/node_job.h"

namespace thalweg {

// It is thread-safe. One thread accepts, and one thread per worker reads.
class Sidecar {
 public:
  struct Options {
    std::string socket_path;
    // These two must outlive the sidecar.
    ShardDirectory* shards = nullptr;
    Device* device = nullptr;
    Device* gpus = nullptr;        // null: gradients on GPUs come through host memory
    uint32_t threads = 1;          // folding threads per job, ≥ 1
    uint32_t window_chunks = 0;    // requested from the shards; 0: they choose
    TraceWriter* trace = nullptr;  // nothing is traced when null; must outlive the sidecar
  };

  // Starts a sidecar, which listens when this returns.
  static absl::StatusOr<std::unique_ptr<Sidecar>> Start(const Options& options,
                                                        MetricRegistry& registry);
  ~Sidecar();  // calls Stop

  struct Connections {
    size_t now = 0;
    uint64_t since_start = 0;
  };
  // Removes workers that have gone, jobs that are over, and shards that they alone have used; call
  // it a few times a second.
  Connections Reap();
  // Returns the latest collectives of every job.
  std::vector<JobFlights> Flights(TimePoint now);
  // Accepts no new workers from now on.
  void StopAccepting();
  // Fails the running jobs with `why` and ends. Idempotent.
  void Stop(const absl::Status& why);

 private:
  struct Reader {
    std::shared_ptr<Connection> connection;  // shared with the job
    bool done = false;
    Thread thread;
  };

  struct Entry {
    // The ownership is shared: readers and shards' sinks use a job while the table removes it.
    std::shared_ptr<NodeJob> job;
    // The invitation is released before the job is stopped, and the rest afterwards.
    ShardDirectory::JobShards shards;
  };

  Sidecar(const Options& options, MetricRegistry& registry);

  void AcceptLoop();
  void Serve(Connection& connection, const std::shared_ptr<Connection>& shared);
  absl::StatusOr<std::shared_ptr<NodeJob>> Admit(const ipc::Hello& hello,
                                                 const std::shared_ptr<Connection>& connection);
  // Serves a shard to a job's nodes until the worker that asks for it hangs up.
  absl::Status HostShard(Connection& connection, const ipc::HostShard& request);
  // Returns the job that the worker belongs to; the first worker starts it.
  absl::StatusOr<std::shared_ptr<NodeJob>> FindJob(const ipc::Hello& hello);
  // Takes what a worker brings along after its Hello.
  absl::Status TakeKept(Connection& connection, NodeJob& job, const ipc::Hello& hello);
  absl::Status ReadMessages(Connection& connection, NodeJob& job, uint32_t local_rank);
  // Takes no lock: rounds may be in flight.
  absl::Status TakePrecision(const ipc::Precision& precision, NodeJob& job, uint32_t local_rank);

  SidecarMetrics metrics_;
  NodeContext context_;
  std::unique_ptr<Listener> listener_;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t num_connections_ ABSL_GUARDED_BY(mutex_) = 0;  // since the start
  std::list<Reader> readers_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Entry> jobs_ ABSL_GUARDED_BY(mutex_);
  Thread accept_thread_;
};

}  // namespace thalweg
