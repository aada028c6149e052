// ClientStream is the node's end of one gRPC stream.
#pragma once

#include <atomic>
#include <memory>

#include "core/base/clock.h"
#include "grpcpp/alarm.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/poller.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/write_queue.h"

namespace thalweg {

class ShardStreams;

// A ClientStream is thread-safe. The ShardStreams owns it until gRPC has completed its last
// operation.
class ClientStream {
 public:
  // The stream is number `index` of its owner's.
  ClientStream(ShardStreams& owner, uint32_t index);

  // Prepares the stream; must be called before any other method. The first frame will be `open`.
  void Prepare(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue& queue,
               const OpenFrame& open);
  // Prepares the stream like Prepare, but where it `waits` it does so for a connection. It is
  // cancelled at `give_up`, unless Keep has been called by then.
  void PrepareAgain(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue& queue,
                    const OpenFrame& open, bool waits, TimePoint give_up);
  void Keep() { patience_.Cancel(); }
  void Start() { call_->StartCall(started_.Tag()); }
  // Starts after `pause`, on the thread of the queue that Prepare got.
  void StartAfter(Duration pause, grpc::CompletionQueue& queue);

  // Queues a frame. The caller must pass the turn to Take, outside its locks.
  [[nodiscard]] WriteQueue::Turn Queue(grpc::ByteBuffer&& frame) {
    return writes_.Push(std::move(frame));
  }
  void Take(WriteQueue::Turn turn);
  // Ends the stream with success; frames in the queue are dropped.
  void Finish() { Take(writes_.Close()); }
  // Ends the stream at once.
  void Cancel();

 private:
  void OnPaused(bool /*ok*/) { Start(); }
  void OnStarted(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  void OnPatience(bool is_over);
  // Runs when reading has ended and the status is known, when the end of writing has completed, and
  // when patience is over or no longer needed.
  void OnEnd(bool ok);

  ShardStreams& owner_;
  const uint32_t index_;
  grpc::ClientContext context_;
  grpc::Alarm patience_;  // set by PrepareAgain only
  grpc::Alarm pause_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  WriteQueue writes_;      // The start of the call takes the first turn.
  grpc::ByteBuffer read_;  // used by OnRead only
  grpc::Status status_;    // read by the last OnEnd
  std::atomic<int> ends_left_{2};

  MemberCompletion<ClientStream, &ClientStream::OnPaused> paused_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnStarted> started_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnRead> read_done_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnWritten> written_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnPatience> patience_over_{*this};
  MemberCompletion<ClientStream, &ClientStream::OnEnd> ended_{*this};
};

}  // namespace thalweg
