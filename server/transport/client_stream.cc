#include "server/transport/client_stream.h"

#include <utility>

#include "server/transport/shard_streams.h"

namespace thalweg {
namespace {

constexpr char kStreamMethod[] = "/thalweg.v1.Exchange/Stream";

}  // namespace

ClientStream::ClientStream(ShardStreams& owner)
    : owner_(owner), writes_(owner.counters(), WriteQueue::Start::kBusy) {}

void ClientStream::Prepare(const std::shared_ptr<grpc::Channel>& channel,
                           grpc::CompletionQueue& queue, const OpenFrame& open) {
  call_ = grpc::GenericStub(channel).PrepareCall(&context_, kStreamMethod, &queue);
  writes_.Push(EncodeOpen(open));
}

void ClientStream::Cancel() {
  context_.TryCancel();
  Do(writes_.Close());
}

void ClientStream::OnStarted(bool /*ok*/) {
  // If the call could not start, the read reports it.
  call_->Read(&read_, &read_done_);
  Do(writes_.Written());
}

void ClientStream::OnRead(bool ok) {
  if (!ok) {
    Finish();
    call_->Finish(&status_, &ended_);
    return;
  }
  owner_.Receive(std::move(read_));
  call_->Read(&read_, &read_done_);
}

void ClientStream::OnWritten(bool ok) {
  if (!ok) Finish();
  Do(writes_.Written());
}

void ClientStream::OnEnd(bool /*ok*/) {
  if (--ends_left_ == 0) owner_.StreamDone(status_);
}

void ClientStream::Do(WriteQueue::Turn turn) {
  if (turn == WriteQueue::Turn::kWrite) {
    call_->Write(writes_.current(), &written_);
  } else if (turn == WriteQueue::Turn::kEnd) {
    call_->WritesDone(&ended_);
  }
}

}  // namespace thalweg
