#include "server/transport/client_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/generic/generic_stub.h"
#include "server/transport/frame_codec.h"
#include "server/transport/status_codec.h"

namespace thalweg {
namespace {

constexpr char kStreamMethod[] = "/thalweg.v1.Exchange/Stream";

// What the end of a stream that the node did not leave means for the job.
absl::Status LostStream(const std::string& peer, const grpc::Status& status) {
  if (status.ok()) return absl::UnavailableError(absl::StrCat(peer, " has closed the stream"));
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
      status.error_code() == grpc::StatusCode::CANCELLED) {
    return absl::UnavailableError(
        absl::StrCat("lost the connection to ", peer, ": ", status.error_message()));
  }
  return Prefixed(peer, FromGrpc(status));
}

}  // namespace

std::shared_ptr<ClientStream> ClientStream::Open(const std::shared_ptr<grpc::Channel>& channel,
                                                 std::string peer, SessionToken token,
                                                 std::shared_ptr<NodeSink> sink,
                                                 StreamCounters counters) {
  std::shared_ptr<ClientStream> stream(
      new ClientStream(std::move(peer), std::move(sink), counters));
  {
    MutexLock lock(stream->mutex_);
    stream->self_ = stream;
  }
  grpc::GenericStub(channel).PrepareBidiStreamingCall(&stream->context_, kStreamMethod, {},
                                                      stream.get());
  // Writes are started outside of gRPC's callbacks, until the turn to end the stream comes.
  stream->AddHold();
  stream->StartRead(&stream->read_);
  stream->Do(stream->writes_.Push(EncodeOpen(token)));
  stream->StartCall();
  return stream;
}

absl::Status ClientStream::Send(const Contribution& contribution) {
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (sink_ == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("the node has left ", peer_));
    }
  }
  const size_t payload_bytes = contribution.payload.SizeBytes();
  if (payload_bytes > 2 * kMaxChunkBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a contribution of ", payload_bytes, " bytes, expected at most ", 2 * kMaxChunkBytes));
  }
  counters_.sent.Add(static_cast<double>(payload_bytes));
  Do(writes_.Push(EncodeChunk(
      {contribution.id, contribution.epoch, contribution.wire, contribution.elems, 0, 0},
      contribution.payload)));
  return absl::OkStatus();
}

void ClientStream::Detach() {
  std::shared_ptr<NodeSink> sink;  // released outside the lock
  MutexLock lock(mutex_);
  sink.swap(sink_);
}

void ClientStream::Finish() { Do(writes_.Close(WriteQueue::Pending::kSend)); }

void ClientStream::Cancel() {
  context_.TryCancel();
  Do(writes_.Close(WriteQueue::Pending::kDrop));
}

bool ClientStream::WaitDone(TimePoint deadline) {
  {
    Done& done = *done_;
    MutexLock lock(done.mutex);
    if (!done.changed.WaitUntil(
            done.mutex, deadline,
            [&done]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(done.mutex) { return done.reached; })) {
      return false;
    }
  }
  MutexLock lock(mutex_);
  self_.reset();  // the caller has a reference too
  return true;
}

void ClientStream::OnReadDone(bool ok) {
  if (!ok) {  // OnDone will say why
    Do(writes_.Close(WriteQueue::Pending::kDrop));
    return;
  }
  const absl::Status status = Handle(read_);
  if (status.ok()) {
    StartRead(&read_);
    return;
  }
  Fail(status);
  Cancel();
}

absl::Status ClientStream::Handle(const grpc::ByteBuffer& bytes) {
  absl::StatusOr<ParsedFrame> parsed = ParseFrame(bytes);
  if (!parsed.ok()) return Prefixed(absl::StrCat(peer_, " sent a frame"), parsed.status());
  if (const auto* failure = std::get_if<FailureFrame>(&*parsed)) return failure->why;
  auto* chunk = std::get_if<ChunkFrame>(&*parsed);
  if (chunk == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(peer_, " sent an open frame"));
  }
  counters_.received.Add(static_cast<double>(chunk->payload.SizeBytes()));
  std::shared_ptr<NodeSink> sink;
  {
    MutexLock lock(mutex_);
    sink = sink_;
  }
  const ChunkHeader& header = chunk->header;
  if (sink != nullptr) {
    sink->OnResult({header.id, header.epoch, header.wire, header.elems, header.workers,
                    header.nonfinite_elems, std::move(chunk->payload)});
  }
  return absl::OkStatus();
}

void ClientStream::Fail(const absl::Status& why) {
  std::shared_ptr<NodeSink> sink;
  {
    MutexLock lock(mutex_);
    if (sink_ == nullptr) return;
    sink.swap(sink_);
    failure_ = why;
  }
  sink->OnFailed(why);
}

void ClientStream::OnWriteDone(bool ok) {
  if (!ok) Do(writes_.Close(WriteQueue::Pending::kDrop));
  Do(writes_.Written());
}

void ClientStream::OnDone(const grpc::Status& status) {
  Fail(LostStream(peer_, status));
  const std::shared_ptr<Done> done = done_;
  MutexLock lock(done->mutex);
  done->reached = true;
  done->changed.NotifyAll();
}

void ClientStream::Do(WriteQueue::Turn turn) {
  if (turn == WriteQueue::Turn::kWrite) {
    StartWrite(&writes_.current());
  } else if (turn == WriteQueue::Turn::kEnd) {
    StartWritesDone();
    RemoveHold();
  }
}

}  // namespace thalweg
