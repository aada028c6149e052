#include "server/transport/server_stream.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/transport/frame_codec.h"
#include "server/transport/status_codec.h"

namespace thalweg {

void StreamSet::Add(const std::shared_ptr<ServerStream>& stream) {
  absl::Status shut_down;
  {
    MutexLock lock(mutex_);
    streams_.insert(stream);
    shut_down = shut_down_;
  }
  if (shut_down.ok()) {
    stream->Start();
  } else {
    stream->End(shut_down);
  }
}

void StreamSet::Remove(const std::shared_ptr<ServerStream>& stream) {
  MutexLock lock(mutex_);
  streams_.erase(stream);
  changed_.NotifyAll();
}

void StreamSet::Shutdown(const absl::Status& why) {
  std::vector<std::shared_ptr<ServerStream>> streams;
  {
    MutexLock lock(mutex_);
    shut_down_ = why;
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) stream->End(why);
}

bool StreamSet::WaitEmpty(TimePoint deadline) {
  MutexLock lock(mutex_);
  return changed_.WaitUntil(mutex_, deadline, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return streams_.empty();
  });
}

StreamCounters StreamCounters::In(MetricRegistry& metrics, const std::string& role) {
  return {metrics.GetCounter("thalweg_grpc_sent_payload_bytes_total",
                             "Gradient bytes handed to gRPC", {{"role", role}}),
          metrics.GetCounter("thalweg_grpc_received_payload_bytes_total",
                             "Gradient bytes received through gRPC", {{"role", role}})};
}

void ServerStream::Start() { StartRead(&read_); }

void ServerStream::End(const absl::Status& why, WriteQueue::Pending pending) {
  {
    MutexLock lock(mutex_);
    if (!ended_) finish_ = ToGrpc(why);
    ended_ = true;
  }
  Do(writes_.Close(pending));
}

void ServerStream::OnResult(RoundResult result) {
  counters_.sent.Add(static_cast<double>(result.payload.SizeBytes()));
  Do(writes_.Push(EncodeChunk(
      {result.id, result.epoch, result.wire, result.elems, result.workers, result.nonfinite_elems},
      result.payload)));
}

void ServerStream::OnFailed(absl::Status why) {
  Do(writes_.Push(EncodeFailure(why)));
  End(absl::OkStatus());
}

void ServerStream::OnReadDone(bool ok) {
  if (!ok) {
    // The peer has ended the stream or is gone, or we have ended it. Whether the node has left in
    // good order, the shard knows.
    if (attached_) shard_.Leave(token_, absl::UnavailableError("lost its connection to the shard"));
    End(absl::OkStatus());
    return;
  }
  const absl::Status status = Handle(read_);
  if (status.ok()) {
    StartRead(&read_);
    return;
  }
  // Ending comes first: the node shall read this reason, and not the failure that its leaving
  // makes.
  End(status);
  if (attached_) shard_.Leave(token_, status);
}

absl::Status ServerStream::Handle(const grpc::ByteBuffer& bytes) {
  absl::StatusOr<ParsedFrame> parsed = ParseFrame(bytes);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("node sent a malformed frame: ", parsed.status().message()));
  }
  if (const auto* open = std::get_if<OpenFrame>(&*parsed)) {
    if (attached_) return absl::InvalidArgumentError("node sent a second open frame");
    THALWEG_RETURN_IF_ERROR(shard_.Attach(open->token, shared_from_this()));
    token_ = open->token;
    attached_ = true;
    return absl::OkStatus();
  }
  auto* chunk = std::get_if<ChunkFrame>(&*parsed);
  if (chunk == nullptr) return absl::InvalidArgumentError("node sent a failure frame");
  if (!attached_) {
    return absl::InvalidArgumentError("node sent a chunk frame first, expected an open frame");
  }
  counters_.received.Add(static_cast<double>(chunk->payload.SizeBytes()));
  const ChunkHeader& header = chunk->header;
  return shard_.Contribute(token_, Contribution{header.id, header.epoch, header.wire, header.elems,
                                                std::move(chunk->payload)});
}

void ServerStream::OnWriteDone(bool ok) {
  if (!ok) {
    End(absl::UnavailableError("lost its connection to the shard"), WriteQueue::Pending::kDrop);
  }
  Do(writes_.Written());
}

void ServerStream::OnDone() { streams_.Remove(shared_from_this()); }

void ServerStream::Do(WriteQueue::Turn turn) {
  if (turn == WriteQueue::Turn::kWrite) {
    StartWrite(&writes_.current());
  } else if (turn == WriteQueue::Turn::kEnd) {
    grpc::Status finish;
    {
      MutexLock lock(mutex_);
      finish = finish_;
    }
    Finish(finish);
  }
}

}  // namespace thalweg
