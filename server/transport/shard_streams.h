// A node's Exchange streams to one aggregator shard, on the node's side: one membership's.
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

// Thread-safe. What ends one stream ends them all. Keeps itself until WaitDone has returned true,
// and must be waited for: released by the thread that polls for it, it could drop the last
// reference to that thread.
class ShardStreams {
 public:
  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    grpc::CompletionQueue* queue = nullptr;  // must outlive the streams
  };
  // Opens a stream for `token` on each connection. `peer` names the shard in errors. The counters
  // must outlive the streams, that is the time until WaitDone has returned true.
  static std::shared_ptr<ShardStreams> Open(const std::vector<Connection>& connections,
                                            std::string peer, SessionToken token,
                                            std::shared_ptr<NodeSink> sink,
                                            StreamCounters counters);

  // Queues the contribution on the stream of its chunk, or says why the streams have failed.
  absl::Status Send(const Contribution& contribution);

  // From now on the sink is not called.
  void Detach();
  // Ends the streams in good order; contributions that wait are dropped. Requires Detach.
  void Finish();
  // Ends the streams at once.
  void Cancel();
  // True when gRPC has done with the streams. Not from gRPC's threads.
  bool WaitDone(TimePoint deadline);

  const StreamCounters& counters() const { return counters_; }

  // For the streams. Passes on what was received.
  void Receive(grpc::ByteBuffer&& bytes);
  // For the streams: gRPC has done with one. Its last call.
  void StreamDone(const grpc::Status& status);

 private:
  // Outlives the streams for the thread that says so.
  struct Done {
    Mutex mutex;
    CondVar changed;
    size_t streams_left ABSL_GUARDED_BY(mutex) = 0;
  };

  ShardStreams(std::string peer, std::shared_ptr<NodeSink> sink, StreamCounters counters)
      : peer_(std::move(peer)), counters_(counters), sink_(std::move(sink)) {}

  absl::Status Handle(grpc::ByteBuffer&& bytes);
  // Tells the sink and ends all streams, unless it has been told or the node has left.
  void Fail(const absl::Status& why);

  const std::string peer_;
  const StreamCounters counters_;
  std::vector<std::unique_ptr<ClientStream>> streams_;  // unchanged after Open

  // Shared with StreamDone, during which the streams may already be gone.
  const std::shared_ptr<Done> done_ = std::make_shared<Done>();

  Mutex mutex_;
  std::shared_ptr<NodeSink> sink_ ABSL_GUARDED_BY(mutex_);  // null: it must not be called any more
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);            // what the sink was told
  std::shared_ptr<ShardStreams> self_ ABSL_GUARDED_BY(mutex_);  // until WaitDone
};

}  // namespace thalweg
