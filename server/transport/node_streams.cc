#include "server/transport/node_streams.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/transport/server_stream.h"

namespace thalweg {
namespace {

// Shard::Attach does not block, so a stream that waits for another stream's Attach only waits for a
// thread to be scheduled.
constexpr Duration kAttachTime = std::chrono::seconds(10);

}  // namespace

absl::Status NodeStreams::Add(const OpenFrame& open, std::shared_ptr<ServerStream> stream) {
  MutexLock lock(mutex_);
  if (open.num_streams != num_streams_) {
    return absl::InvalidArgumentError(absl::StrCat("node opened stream ", open.stream, " of ",
                                                   open.num_streams, ", expected one of ",
                                                   num_streams_, " as it said before"));
  }
  if (streams_[open.stream] != nullptr) {
    return absl::AlreadyExistsError(
        absl::StrCat("node has stream ", open.stream, " of ", num_streams_, " open already"));
  }
  streams_[open.stream] = std::move(stream);
  return absl::OkStatus();
}

bool NodeStreams::Remove(uint32_t index) {
  std::shared_ptr<ServerStream> stream;  // released outside the lock
  MutexLock lock(mutex_);
  stream.swap(streams_[index]);
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& other) { return other == nullptr; });
}

absl::Status NodeStreams::Begin(uint32_t index) {
  bool first;
  {
    MutexLock lock(mutex_);
    first = !attaching_;
    attaching_ = true;
  }
  std::optional<absl::Status> attached;
  if (first) attached = shard_.Attach(key_.token, key_.identity, shared_from_this());

  std::shared_ptr<ServerStream> stream;
  std::optional<End> end;
  {
    MutexLock lock(mutex_);
    if (first) {
      attached_ = attached;
      changed_.NotifyAll();
    } else if (!changed_.WaitUntil(mutex_, Now() + kAttachTime,
                                   [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                     return attached_.has_value();
                                   })) {
      return absl::UnavailableError("the shard takes too long to attach the node's first stream");
    }
    attached = attached_;
    stream = streams_[index];
    end = end_;
  }
  // The node ended before this stream was added.
  if (end) EndOne(*stream, *end);
  return *attached;
}

absl::Status NodeStreams::Contribute(uint32_t index, ChunkFrame chunk) {
  const ChunkHeader& header = chunk.header;
  const uint32_t expected = header.id.chunk % num_streams_;
  if (index != expected) {
    return absl::InvalidArgumentError(absl::StrCat("node sent chunk ", header.id.chunk,
                                                   " on stream ", index, " of ", num_streams_,
                                                   ", expected it on stream ", expected));
  }
  counters_.received.Add(static_cast<double>(chunk.payload.SizeBytes()));
  return shard_.Contribute(key_.token,
                           Contribution{header.id, header.epoch, header.wire, header.elems,
                                        std::move(chunk.payload), header.loss_scale});
}

void NodeStreams::Refuse(const absl::Status& why) {
  const bool leaving = BeginLeave();
  EndAll({.why = why});
  if (leaving) shard_.Leave(key_.token, why);
}

void NodeStreams::Lost(uint32_t index, const absl::Status& end) {
  // Our own reason is sent before the failure that Leave causes, as in Refuse.
  if (!end.ok()) EndAll({.why = end});
  if (BeginLeave()) {
    shard_.Leave(key_.token, absl::UnavailableError("lost its connection to the shard"));
  }
  std::shared_ptr<ServerStream> stream;
  {
    MutexLock lock(mutex_);
    stream = streams_[index];
  }
  stream->End(absl::OkStatus());
  EndAll({.why = absl::UnavailableError(
              absl::StrCat("stream ", index, " of the node's ", num_streams_, " has ended"))});
}

void NodeStreams::OnResult(RoundResult result) {
  const uint32_t index = result.id.chunk % num_streams_;
  std::shared_ptr<ServerStream> stream;
  {
    MutexLock lock(mutex_);
    if (end_) return;
    stream = streams_[index];
  }
  if (stream == nullptr) {
    // A result answers a contribution, and this node's contribution came on that stream or never
    // came.
    EndAll({.why = absl::InternalError(absl::StrCat("chunk ", result.id.chunk,
                                                    " has a result, but its stream, ", index,
                                                    " of ", num_streams_, ", is not open"))});
    return;
  }
  counters_.sent.Add(static_cast<double>(result.payload.SizeBytes()));
  stream->Send(EncodeChunk(
      {result.id, result.epoch, result.wire, result.elems, result.workers, result.nonfinite_elems},
      result.payload));
}

uint32_t NodeStreams::Backlog() const {
  MutexLock lock(mutex_);
  size_t waiting = 0;
  for (const auto& stream : streams_) {
    if (stream != nullptr) waiting += stream->Waiting();
  }
  return static_cast<uint32_t>(waiting);
}

void NodeStreams::OnFailed(absl::Status why) { EndAll({.why = std::move(why), .by_shard = true}); }

void NodeStreams::EndAll(const End& end) {
  std::vector<std::shared_ptr<ServerStream>> streams;
  {
    MutexLock lock(mutex_);
    if (end_) return;
    end_ = end;
    streams = streams_;
  }
  for (const auto& stream : streams) {
    if (stream != nullptr) EndOne(*stream, end);
  }
}

void NodeStreams::EndOne(ServerStream& stream, const End& end) {
  if (end.by_shard) {
    stream.EndWith(EncodeFailure(end.why));
  } else {
    stream.End(end.why);
  }
}

bool NodeStreams::BeginLeave() {
  MutexLock lock(mutex_);
  return !std::exchange(has_left_, true);
}

absl::StatusOr<std::shared_ptr<NodeStreams>> NodeTable::Admit(
    const OpenFrame& open, std::shared_ptr<ServerStream> stream) {
  if (open.num_streams == 0 || open.num_streams > kMaxStreams || open.stream >= open.num_streams) {
    return absl::InvalidArgumentError(absl::StrCat("node opened stream ", open.stream, " of ",
                                                   open.num_streams, ", expected 1 to ",
                                                   kMaxStreams, " streams, counted from 0"));
  }
  MutexLock lock(mutex_);
  const NodeStreams::Key key{open.token, open.identity};
  std::shared_ptr<NodeStreams>& node = nodes_[key];
  if (node == nullptr) {
    node = std::make_shared<NodeStreams>(key, open.num_streams, shard_, counters_);
  }
  THALWEG_RETURN_IF_ERROR(node->Add(open, std::move(stream)));
  return node;
}

void NodeTable::Release(NodeStreams& node, uint32_t index) {
  MutexLock lock(mutex_);
  if (node.Remove(index)) nodes_.erase(node.key());
}

}  // namespace thalweg
