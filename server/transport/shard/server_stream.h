// ServerStream is the aggregator's end of one gRPC stream of a node.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/base/mutex.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/guard/authorizer.h"
#include "server/transport/poller.h"
#include "server/transport/shard/node_streams.h"
#include "server/transport/shard/node_table.h"
#include "server/transport/shard/stream_set.h"
#include "server/transport/write_queue.h"
#include "thalweg/v1/exchange.grpc.pb.h"

namespace thalweg {

// A ServerStream is thread-safe. The StreamSet keeps it until gRPC has completed its last
// operation, and so does its NodeStreams. After the end, calls are ignored.
class ServerStream final : public std::enable_shared_from_this<ServerStream> {
 public:
  using Service = v1::Exchange::WithRawMethod_Stream<v1::Exchange::Service>;

  // Waits on `queue`'s thread for a node to open a stream; then waits for the next one with a new
  // ServerStream, until the server ends. All references must outlive gRPC's use of the stream.
  static void Accept(Service& service, grpc::ServerCompletionQueue& queue, Authorizer& authorizer,
                     NodeTable& nodes, StreamSet& streams);

  // Starts reading. Call once, after the stream is in the set.
  void Start() { call_.Read(&read_, read_done_.Tag()); }

  // Queues a frame. The caller must pass the turn to Take, outside its locks.
  [[nodiscard]] WriteQueue::Turn Queue(grpc::ByteBuffer&& frame, bool is_answer = false) {
    return writes_.Push(std::move(frame), is_answer);
  }
  void Take(WriteQueue::Turn turn);
  // Finishes with `why`; queued results are dropped. Only the first end counts.
  void End(const absl::Status& why);
  // Finishes with OK after this frame, unless it has ended already.
  void EndWith(grpc::ByteBuffer&& frame) { Take(writes_.PushLast(std::move(frame))); }

  // Cancels the stream if it has not been opened, or a write has not ended, since before `before`.
  void CutIfStalled(TimePoint before);

  size_t WaitingAnswers() const { return writes_.WaitingAnswers(); }
  // The connection, as gRPC names its other end; empty before the stream has been accepted.
  const std::string& peer() const { return peer_; }

 private:
  ServerStream(Service& service, grpc::ServerCompletionQueue& queue, Authorizer& authorizer,
               NodeTable& nodes, StreamSet& streams)
      : service_(service),
        queue_(queue),
        authorizer_(authorizer),
        nodes_(nodes),
        streams_(streams),
        writes_(nodes.counters()) {}

  void OnAccepted(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  // Runs when reading has ended and the status has been sent.
  void OnEnd(bool ok);

  void ReadFailed();
  absl::Status Handle();
  absl::Status Open(const OpenFrame& open);

  Service& service_;
  grpc::ServerCompletionQueue& queue_;
  Authorizer& authorizer_;
  NodeTable& nodes_;
  StreamSet& streams_;
  std::shared_ptr<ServerStream> self_;  // set until OnAccepted
  grpc::ServerContext context_;
  grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer> call_{&context_};
  WriteQueue writes_;
  std::atomic<int> ends_left_{2};
  TimePoint accepted_at_;  // this and the next are set before it is in the set
  std::string peer_;
  std::shared_ptr<void> place_;         // until the open frame has arrived
  std::atomic<bool> is_opened_{false};  // its open frame has arrived

  // Only OnRead, of which one runs at a time, and the last OnEnd use these.
  grpc::ByteBuffer read_;
  std::shared_ptr<NodeStreams> node_;  // null until the open frame
  uint32_t index_ = 0;

  Mutex mutex_;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);  // how to finish; with OK when empty

  MemberCompletion<ServerStream, &ServerStream::OnAccepted> accepted_{*this};
  MemberCompletion<ServerStream, &ServerStream::OnRead> read_done_{*this};
  MemberCompletion<ServerStream, &ServerStream::OnWritten> written_{*this};
  MemberCompletion<ServerStream, &ServerStream::OnEnd> ended_{*this};
};

}  // namespace thalweg
