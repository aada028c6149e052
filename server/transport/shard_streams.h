// ShardStreams holds the node's ends of one membership's Exchange streams to one aggregator shard.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/client_stream.h"
#include "server/transport/stream_counters.h"

namespace thalweg {

// A ShardStreams is thread-safe. When one stream ends, all end. The object keeps itself alive until
// WaitDone has returned true. Its user must call WaitDone: otherwise the polling thread could drop
// the last reference, and would have to join itself.
class ShardStreams {
 public:
  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    grpc::CompletionQueue* queue = nullptr;  // must outlive the streams
  };
  // A Ticket is a membership, and what proves to the shard that it is ours.
  struct Ticket {
    SessionToken token = 0;
    std::string identity = {};
    std::shared_ptr<const JobSigner> signer = nullptr;  // null: nothing proves the identity
  };
  // Opens a stream of the membership on each connection. `peer` names the shard in errors. The
  // counters must outlive the streams, that is until WaitDone has returned true.
  static std::shared_ptr<ShardStreams> Open(const std::vector<Connection>& connections,
                                            std::string peer, const Ticket& ticket,
                                            std::shared_ptr<NodeSink> sink,
                                            StreamCounters counters);

  // Queues the contribution on its chunk's stream, or returns why the streams have failed.
  absl::Status Send(const Contribution& contribution);

  // Stops all calls to the sink from now on.
  void Detach();
  // Ends the streams with success; queued contributions are dropped. Requires Detach.
  void Finish();
  // Ends the streams at once.
  void Cancel();
  // Waits until gRPC has completed the streams; returns false at the deadline. Must not run on
  // gRPC's threads.
  bool WaitDone(TimePoint deadline);

  const StreamCounters& counters() const { return counters_; }

  // Passes on a received frame; called by the streams.
  void Receive(grpc::ByteBuffer&& bytes);
  // Is called by each stream as its last call, when gRPC has completed it.
  void StreamDone(const grpc::Status& status);

 private:
  // Done outlives the streams, for the thread that sets it.
  struct Done {
    Mutex mutex;
    CondVar changed;
    size_t streams_left ABSL_GUARDED_BY(mutex) = 0;
  };

  ShardStreams(std::string peer, std::shared_ptr<NodeSink> sink, StreamCounters counters)
      : peer_(std::move(peer)), counters_(counters), sink_(std::move(sink)) {}

  absl::Status Handle(grpc::ByteBuffer&& bytes);
  // Tells the sink and ends all streams, unless the sink has been told or the node has left.
  void Fail(const absl::Status& why);

  const std::string peer_;
  const StreamCounters counters_;
  std::vector<std::unique_ptr<ClientStream>> streams_;  // unchanged after Open

  // StreamDone shares this, because the streams may be destroyed while it runs.
  const std::shared_ptr<Done> done_ = std::make_shared<Done>();

  Mutex mutex_;
  std::shared_ptr<NodeSink> sink_ ABSL_GUARDED_BY(mutex_);      // null when calls must stop
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);                // the status that the sink got
  std::shared_ptr<ShardStreams> self_ ABSL_GUARDED_BY(mutex_);  // set until WaitDone
};

}  // namespace thalweg
