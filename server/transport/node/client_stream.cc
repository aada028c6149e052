#include "server/transport/node/client_stream.h"

#include <utility>

#include "server/transport/channel_options.h"
#include "server/transport/node/shard_streams.h"

namespace thalweg {
namespace {

constexpr char kStreamMethod[] = "/thalweg.v1.Exchange/Stream";

}  // namespace

ClientStream::ClientStream(ShardStreams& owner, uint32_t index)
    : owner_(owner), index_(index), writes_(owner.counters(), WriteQueue::Start::kBusy) {}

void ClientStream::Prepare(const std::shared_ptr<grpc::Channel>& channel,
                           grpc::CompletionQueue& queue, const OpenFrame& open) {
  call_ = grpc::GenericStub(channel).PrepareCall(&context_, kStreamMethod, &queue);
  writes_.Push(EncodeOpen(open));
}

void ClientStream::PrepareAgain(const std::shared_ptr<grpc::Channel>& channel,
                                grpc::CompletionQueue& queue, const OpenFrame& open, bool waits,
                                TimePoint give_up) {
  context_.set_wait_for_ready(waits);
  Prepare(channel, queue, open);
  ++ends_left_;
  patience_.Set(&queue, ToSystemTime(give_up), patience_over_.Tag());
}

void ClientStream::StartAfter(Duration pause, grpc::CompletionQueue& queue) {
  pause_.Set(&queue, ToSystemTime(Now() + pause), paused_.Tag());
}

void ClientStream::Cancel() {
  context_.TryCancel();
  Take(writes_.Close());
}

void ClientStream::OnStarted(bool /*ok*/) {
  // If the call could not start, the read reports it.
  call_->Read(&read_, read_done_.Tag());
  Take(writes_.Written());
}

void ClientStream::OnRead(bool ok) {
  if (!ok) {
    Keep();
    Finish();
    call_->Finish(&status_, ended_.Tag());
    return;
  }
  {
    const Poller::Working working;  // it may decode
    owner_.Receive(index_, std::move(read_));
  }
  call_->Read(&read_, read_done_.Tag());
}

void ClientStream::OnWritten(bool ok) {
  if (!ok) Finish();
  Take(writes_.Written());
}

void ClientStream::OnPatience(bool is_over) {
  if (is_over) Cancel();
  OnEnd(is_over);
}

void ClientStream::OnEnd(bool /*ok*/) {
  if (--ends_left_ == 0) owner_.StreamDone(index_, status_);
}

void ClientStream::Take(WriteQueue::Turn turn) {
  if (turn == WriteQueue::Turn::kWrite) {
    call_->Write(writes_.current(), written_.Tag());
  } else if (turn == WriteQueue::Turn::kEnd) {
    call_->WritesDone(ended_.Tag());
  }
}

}  // namespace thalweg
