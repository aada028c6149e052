// A node's Exchange stream to one aggregator shard, on the node's side.
#pragma once

#include <memory>
#include <string>

#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/support/client_callback.h"
#include "server/transport/server_stream.h"
#include "server/transport/write_queue.h"

namespace thalweg {

// Thread-safe. Keeps itself until WaitDone has returned true, and must be waited for: released by
// one of gRPC's threads, it could drop the last reference to the channel there, and so make gRPC
// join that thread from itself.
class ClientStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Opens a stream for `token` on `channel`. `peer` names the shard in errors. The counters must
  // outlive the stream, that is the time until WaitDone has returned true.
  static std::shared_ptr<ClientStream> Open(const std::shared_ptr<grpc::Channel>& channel,
                                            std::string peer, SessionToken token,
                                            std::shared_ptr<NodeSink> sink,
                                            StreamCounters counters);

  // Queues the contribution, or says why the stream has failed.
  absl::Status Send(const Contribution& contribution);

  // From now on the sink is not called.
  void Detach();
  // Ends the stream when all that is queued has been sent. Requires Detach.
  void Finish();
  // Ends the stream at once. Requires Detach.
  void Cancel();
  // True when gRPC has done with the stream. Not from gRPC's threads.
  bool WaitDone(TimePoint deadline);

 private:
  // Outlives the stream for the thread that says so.
  struct Done {
    Mutex mutex;
    CondVar changed;
    bool reached GUARDED_BY(mutex) = false;
  };

  ClientStream(std::string peer, std::shared_ptr<NodeSink> sink, StreamCounters counters)
      : peer_(std::move(peer)), counters_(counters), sink_(std::move(sink)) {}

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  // Passes on what was received; not OK when the stream is of no use any more.
  absl::Status Handle(const grpc::ByteBuffer& bytes);
  // Tells the sink, unless it has been told or the node has left.
  void Fail(const absl::Status& why);
  void Do(WriteQueue::Turn turn);

  const std::string peer_;
  const StreamCounters counters_;
  grpc::ClientContext context_;
  WriteQueue writes_;
  grpc::ByteBuffer read_;  // only for OnReadDone

  // Shared with OnDone, during which the stream may already be gone.
  const std::shared_ptr<Done> done_ = std::make_shared<Done>();

  Mutex mutex_;
  std::shared_ptr<NodeSink> sink_ GUARDED_BY(mutex_);      // null: it must not be called any more
  absl::Status failure_ GUARDED_BY(mutex_);                // what the sink was told
  std::shared_ptr<ClientStream> self_ GUARDED_BY(mutex_);  // until WaitDone
};

}  // namespace thalweg
