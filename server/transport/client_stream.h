// One gRPC stream of a node, on the node's side.
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

// Thread-safe. Owned by the ShardStreams, which keeps it until gRPC has done with it.
class ClientStream {
 public:
  explicit ClientStream(ShardStreams& owner);

  // Makes the stream ready for every other call; the first frame will be `open`.
  void Prepare(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue& queue,
               const OpenFrame& open);
  void Start() { call_->StartCall(&started_); }

  void Send(grpc::ByteBuffer&& frame) { Do(writes_.Push(std::move(frame))); }
  // Ends the stream in good order; frames that wait are dropped.
  void Finish() { Do(writes_.Close()); }
  // Ends the stream at once.
  void Cancel();

 private:
  void OnStarted(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  // Reading has ended and the status is there; all is written and the end has been said.
  void OnEnd(bool ok);

  void Do(WriteQueue::Turn turn);

  ShardStreams& owner_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  WriteQueue writes_;      // busy with the start of the call at first
  grpc::ByteBuffer read_;  // only for OnRead
  grpc::Status status_;    // for the last OnEnd
  std::atomic<int> ends_left_{2};

  MemberCompletion<ClientStream, &ClientStream::OnStarted> started_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnRead> read_done_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnWritten> written_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnEnd> ended_{*this};
};

}  // namespace thalweg
