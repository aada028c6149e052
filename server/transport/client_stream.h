// ClientStream is the node's end of one gRPC stream.
#pragma once

#include <atomic>
#include <memory>

#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/frame_codec.h"
#include "server/transport/poller.h"
#include "server/transport/write_queue.h"

namespace thalweg {

class ShardStreams;

// A ClientStream is thread-safe. The ShardStreams owns it until gRPC has completed its last
// operation.
class ClientStream {
 public:
  explicit ClientStream(ShardStreams& owner);

  // Prepares the stream; must be called before any other method. The first frame will be `open`.
  void Prepare(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue& queue,
               const OpenFrame& open);
  void Start() { call_->StartCall(&started_); }

  void Send(grpc::ByteBuffer&& frame) { Do(writes_.Push(std::move(frame))); }
  // Ends the stream with success; frames in the queue are dropped.
  void Finish() { Do(writes_.Close()); }
  // Ends the stream at once.
  void Cancel();

 private:
  void OnStarted(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  // Runs when reading has ended and the status is known, and when the end of writing has completed.
  void OnEnd(bool ok);

  void Do(WriteQueue::Turn turn);

  ShardStreams& owner_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  WriteQueue writes_;      // The start of the call takes the first turn.
  grpc::ByteBuffer read_;  // used by OnRead only
  grpc::Status status_;    // read by the last OnEnd
  std::atomic<int> ends_left_{2};

  MemberCompletion<ClientStream, &ClientStream::OnStarted> started_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnRead> read_done_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnWritten> written_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnEnd> ended_{*this};
};

}  // namespace thalweg
