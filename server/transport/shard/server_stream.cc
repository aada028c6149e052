#include "server/transport/shard/server_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/base/log.h"
#include "server/transport/proofs.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/wire/status_codec.h"
#include "spdlog/spdlog.h"

namespace thalweg {

void ServerStream::Accept(Service& service, grpc::ServerCompletionQueue& queue,
                          Authorizer& authorizer, NodeTable& nodes, StreamSet& streams) {
  std::shared_ptr<ServerStream> stream(
      new ServerStream(service, queue, authorizer, nodes, streams));
  stream->self_ = stream;
  service.RequestStream(&stream->context_, &stream->call_, &queue, &queue, stream->accepted_.Tag());
}

void ServerStream::OnAccepted(bool ok) {
  const std::shared_ptr<ServerStream> self = std::move(self_);
  if (!ok) return;  // the server is stopping
  accepted_at_ = Now();
  peer_ = context_.peer();
  place_ = streams_.TakePlace(AddressOf(context_));
  // Not a status, which would wait until the peer reads it.
  if (place_ == nullptr) context_.TryCancel();
  // The set takes the stream first: its queue, which this thread polls, is shut down only when the
  // set is empty, and accepts no request afterwards.
  if (streams_.Add(self)) Accept(service_, queue_, authorizer_, nodes_, streams_);
}

void ServerStream::End(const absl::Status& why) {
  {
    MutexLock lock(mutex_);
    if (!end_) end_ = why;
  }
  Take(writes_.Close());
}

void ServerStream::CutIfStalled(TimePoint before) {
  const TimePoint since = is_opened_ ? writes_.BusySince() : accepted_at_;
  if (since >= before) return;
  spdlog::debug("{}: cuts a stream: its peer {}", context_.peer(),
                is_opened_ ? "does not read" : "has not said who it is");
  context_.TryCancel();
}

void ServerStream::OnRead(bool ok) {
  if (!ok) {
    ReadFailed();
    OnEnd(ok);
    return;
  }
  const bool opening = node_ == nullptr;
  absl::Status status;
  {
    const Poller::Working working;  // it may fold, and send to many nodes
    status = Handle();
  }
  if (status.ok()) {
    call_.Read(&read_, read_done_.Tag());
    return;
  }
  if (opening) {
    spdlog::debug("{}: refused a stream: {}", context_.peer(), Text(status));
    End(status);  // no node owns the stream yet, so the node that it names is not failed
  } else {
    node_->Refuse(status);
  }
  OnEnd(ok);
}

// The peer ended the stream or is gone, or we ended it.
void ServerStream::ReadFailed() {
  absl::Status end;
  {
    MutexLock lock(mutex_);
    end = end_.value_or(absl::OkStatus());
  }
  node_ == nullptr ? End(absl::OkStatus()) : node_->Lost(index_, *this, end);
}

absl::Status ServerStream::Handle() {
  absl::StatusOr<ParsedFrame> parsed = ParseFrame(std::move(read_));
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("node sent a malformed frame: ", parsed.status().message()));
  }
  if (const auto* open = std::get_if<OpenFrame>(&*parsed)) {
    if (node_ != nullptr) return absl::InvalidArgumentError("node sent a second open frame");
    return Open(*open);
  }
  auto* chunk = std::get_if<ChunkFrame>(&*parsed);
  const auto* acknowledged = std::get_if<AcknowledgedFrame>(&*parsed);
  if (chunk == nullptr && acknowledged == nullptr) {
    return absl::InvalidArgumentError("node sent a failure or resumed frame");
  }
  if (node_ == nullptr) {
    return absl::InvalidArgumentError("node sent another frame first, expected an open frame");
  }
  if (acknowledged != nullptr) {
    return node_->Acknowledged(index_, *this, acknowledged->received);
  }
  return node_->Contribute(index_, *this, std::move(*chunk));
}

absl::Status ServerStream::Open(const OpenFrame& open) {
  if (const absl::Status proved = CheckProof(open); !proved.ok()) {
    authorizer_.NotProved(context_, proved);
    return proved;
  }
  THALWEG_ASSIGN_OR_RETURN(const std::shared_ptr<NodeStreams> node, nodes_.Find(open.token));
  THALWEG_RETURN_IF_ERROR(authorizer_.CheckOwner(context_, node->key().principal));
  THALWEG_ASSIGN_OR_RETURN(node_, nodes_.Admit(open, shared_from_this()));
  index_ = open.stream;
  is_opened_ = true;
  place_ = nullptr;
  return absl::OkStatus();
}

void ServerStream::OnWritten(bool ok) {
  if (!ok) Take(writes_.Close());  // the read fails too, and decides how the stream ends
  Take(writes_.Written());
}

void ServerStream::OnEnd(bool /*ok*/) {
  if (--ends_left_ > 0) return;
  if (node_ != nullptr) node_->Remove(index_, *this);
  place_ = nullptr;
  streams_.Remove(shared_from_this());
}

void ServerStream::Take(WriteQueue::Turn turn) {
  if (turn == WriteQueue::Turn::kWrite) {
    call_.Write(writes_.current(), written_.Tag());
  } else if (turn == WriteQueue::Turn::kEnd) {
    absl::Status end;
    {
      MutexLock lock(mutex_);
      end = end_.value_or(absl::OkStatus());
    }
    call_.Finish(ToGrpc(end), ended_.Tag());
  }
}

}  // namespace thalweg
