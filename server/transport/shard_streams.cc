#include "server/transport/shard_streams.h"

#include "absl/strings/str_cat.h"
#include "server/transport/frame_codec.h"
#include "server/transport/proofs.h"
#include "server/transport/status_codec.h"

namespace thalweg {
namespace {

// Returns the status that the job gets when a stream ends without the node having left.
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

std::shared_ptr<ShardStreams> ShardStreams::Open(const std::vector<Connection>& connections,
                                                 std::string peer, const Ticket& ticket,
                                                 std::shared_ptr<NodeSink> sink,
                                                 StreamCounters counters) {
  std::shared_ptr<ShardStreams> all(new ShardStreams(std::move(peer), std::move(sink), counters));
  {
    MutexLock lock(all->mutex_);
    all->self_ = all;
  }
  {
    MutexLock lock(all->done_->mutex);
    all->done_->streams_left = connections.size();
  }
  const auto num_streams = static_cast<uint32_t>(connections.size());
  for (uint32_t i = 0; i < num_streams; ++i) {
    all->streams_.push_back(std::make_unique<ClientStream>(*all));
    OpenFrame open{ticket.token, i, num_streams, ticket.identity};
    if (ticket.signer != nullptr) open.proof = ticket.signer->Sign(StreamStatement(open));
    all->streams_.back()->Prepare(connections[i].channel, *connections[i].queue, open);
  }
  // Streams start only when all are prepared: one that fails cancels the others from another
  // thread.
  for (const auto& stream : all->streams_) stream->Start();
  return all;
}

absl::Status ShardStreams::Send(const Contribution& contribution) {
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (sink_ == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("the node has left ", peer_));
    }
  }
  const size_t payload_bytes = contribution.payload.SizeBytes();
  if (payload_bytes > kMaxPayloadBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a contribution of ", payload_bytes,
                                                   " bytes, expected at most ", kMaxPayloadBytes));
  }
  counters_.sent.Add(static_cast<double>(payload_bytes));
  streams_[contribution.id.chunk % streams_.size()]->Send(
      EncodeChunk({contribution.id, contribution.epoch, contribution.wire, contribution.elems, 0, 0,
                   contribution.loss_scale},
                  contribution.payload));
  return absl::OkStatus();
}

void ShardStreams::Detach() {
  std::shared_ptr<NodeSink> sink;  // released outside the lock
  MutexLock lock(mutex_);
  sink.swap(sink_);
}

void ShardStreams::Finish() {
  for (const auto& stream : streams_) stream->Finish();
}

void ShardStreams::Cancel() {
  for (const auto& stream : streams_) stream->Cancel();
}

bool ShardStreams::WaitDone(TimePoint deadline) {
  {
    Done& done = *done_;
    MutexLock lock(done.mutex);
    if (!done.changed.WaitUntil(done.mutex, deadline,
                                [&done]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(done.mutex) {
                                  return done.streams_left == 0;
                                })) {
      return false;
    }
  }
  MutexLock lock(mutex_);
  self_.reset();  // the caller holds a reference too
  return true;
}

void ShardStreams::Receive(grpc::ByteBuffer&& bytes) {
  const absl::Status status = Handle(std::move(bytes));
  if (status.ok()) return;
  Fail(status);
  Cancel();
}

absl::Status ShardStreams::Handle(grpc::ByteBuffer&& bytes) {
  absl::StatusOr<ParsedFrame> parsed = ParseFrame(std::move(bytes));
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

void ShardStreams::Fail(const absl::Status& why) {
  std::shared_ptr<NodeSink> sink;
  {
    MutexLock lock(mutex_);
    if (sink_ == nullptr) return;
    sink.swap(sink_);
    failure_ = why;
  }
  sink->OnFailed(why);
  Cancel();
}

void ShardStreams::StreamDone(const grpc::Status& status) {
  Fail(LostStream(peer_, status));
  const std::shared_ptr<Done> done = done_;
  MutexLock lock(done->mutex);
  --done->streams_left;
  done->changed.NotifyAll();
}

}  // namespace thalweg
