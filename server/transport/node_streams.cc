#include "server/transport/node_streams.h"

#include <algorithm>
#include <chrono>
#include <map>
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

absl::Status NodeStreams::CheckLocked(const OpenFrame& open) const {
  if (open.num_streams != num_streams_) {
    return absl::InvalidArgumentError(absl::StrCat("node opened stream ", open.stream, " of ",
                                                   open.num_streams, ", expected one of ",
                                                   num_streams_, " as it said before"));
  }
  const Lane& lane = lanes_[open.stream];
  if (lane.was_open && open.incarnation <= lane.incarnation) {
    return absl::AlreadyExistsError(
        absl::StrCat("node has stream ", open.stream, " of ", num_streams_, " open already"));
  }
  return absl::OkStatus();
}

absl::Status NodeStreams::Add(const OpenFrame& open, const std::shared_ptr<ServerStream>& stream) {
  std::shared_ptr<ServerStream> replaced = stream;
  SentFrames::Frames released;  // outside the lock
  auto turn = WriteQueue::Turn::kNothing;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckLocked(open));
    Lane& lane = lanes_[open.stream];
    if (open.incarnation > 1) {  // the earlier ones may have broken before they arrived here
      THALWEG_RETURN_IF_ERROR(lane.sent.Acknowledge(open.received, &released));
      turn = stream->Queue(EncodeResumed({lane.received}));
      for (const grpc::ByteBuffer& frame : lane.sent.frames()) {
        turn = std::max(turn, stream->Queue(grpc::ByteBuffer(frame)));
      }
    }
    lane.was_open = true;
    lane.incarnation = open.incarnation;
    lane.stream.swap(replaced);
  }
  if (open.incarnation > 1) counters_.resumed.Add(1);
  if (replaced != nullptr) {
    replaced->End(absl::AbortedError("the node has opened this stream again"));
  }
  stream->Take(turn);
  return absl::OkStatus();
}

bool NodeStreams::Remove(uint32_t index, const ServerStream& stream) {
  std::shared_ptr<ServerStream> removed;  // released outside the lock
  MutexLock lock(mutex_);
  if (lanes_[index].stream.get() == &stream) removed.swap(lanes_[index].stream);
  const bool has_left = has_left_;
  return std::all_of(lanes_.begin(), lanes_.end(), [has_left](const Lane& lane) {
    return lane.stream == nullptr && (lane.incarnation == 0 || has_left);
  });
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
    stream = lanes_[index].stream;
    end = end_;
  }
  // The node ended before this stream was added.
  if (end && stream != nullptr) EndOne(*stream, *end);
  return *attached;
}

absl::Status NodeStreams::Contribute(uint32_t index, const ServerStream& from, ChunkFrame chunk) {
  const ChunkHeader& header = chunk.header;
  const uint32_t expected = header.id.chunk % num_streams_;
  if (index != expected) {
    return absl::InvalidArgumentError(absl::StrCat("node sent chunk ", header.id.chunk,
                                                   " on stream ", index, " of ", num_streams_,
                                                   ", expected it on stream ", expected));
  }
  SentFrames::Frames released;  // outside the lock
  {
    MutexLock lock(mutex_);
    Lane& lane = lanes_[index];
    if (lane.stream.get() != &from) return absl::OkStatus();
    ++lane.received;
    THALWEG_RETURN_IF_ERROR(lane.sent.Acknowledge(header.acknowledged, &released));
    // An honest node has at most its window on the way, and acknowledges all but that.
    if (lane.sent.frames().size() > kMaxWindowChunks) {
      return absl::InvalidArgumentError(absl::StrCat("node has acknowledged none of the last ",
                                                     lane.sent.frames().size(), " results"));
    }
  }
  released.clear();
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

void NodeStreams::Lost(uint32_t index, ServerStream& stream, const absl::Status& end) {
  std::shared_ptr<ServerStream> broken;
  {
    MutexLock lock(mutex_);
    Lane& lane = lanes_[index];
    const bool is_latest = lane.stream.get() == &stream;
    const bool may_come_back = end.ok() && lane.incarnation > 0 && !has_left_;
    if (is_latest && may_come_back) broken.swap(lane.stream);
    if (!is_latest) broken = stream.shared_from_this();
  }
  if (broken != nullptr) {
    broken->End(absl::OkStatus());
    return;
  }
  // Our own reason is sent before the failure that Leave causes, as in Refuse.
  if (!end.ok()) EndAll({.why = end});
  if (BeginLeave()) {
    shard_.Leave(key_.token, absl::UnavailableError("lost its connection to the shard"));
  }
  stream.End(absl::OkStatus());
  EndAll({.why = absl::UnavailableError(
              absl::StrCat("stream ", index, " of the node's ", num_streams_, " has ended"))});
}

void NodeStreams::OnResult(RoundResult result) {
  const uint32_t index = result.id.chunk % num_streams_;
  uint64_t received;
  {
    MutexLock lock(mutex_);
    if (end_) return;
    received = lanes_[index].incarnation > 0 ? lanes_[index].received : 0;
  }
  counters_.sent.Add(static_cast<double>(result.payload.SizeBytes()));
  grpc::ByteBuffer frame =
      EncodeChunk({result.id, result.epoch, result.wire, result.elems, result.workers,
                   result.nonfinite_elems, kUnknownLossScale, received},
                  result.payload);
  std::shared_ptr<ServerStream> stream;
  auto turn = WriteQueue::Turn::kNothing;
  {
    MutexLock lock(mutex_);
    if (end_) return;
    Lane& lane = lanes_[index];
    if (lane.incarnation > 0) lane.sent.Add(frame);
    stream = lane.stream;
    if (stream != nullptr) turn = stream->Queue(std::move(frame));
    // A broken stream sends the result when it is opened again.
    if (stream == nullptr && lane.incarnation > 0) return;
  }
  if (stream != nullptr) {
    stream->Take(turn);
    return;
  }
  // A result answers a contribution, and this node's contribution came on that stream or never
  // came.
  EndAll({.why = absl::InternalError(absl::StrCat("chunk ", result.id.chunk,
                                                  " has a result, but its stream, ", index, " of ",
                                                  num_streams_, ", is not open"))});
}

uint32_t NodeStreams::Backlog() const {
  MutexLock lock(mutex_);
  size_t waiting = 0;
  for (const Lane& lane : lanes_) {
    if (lane.stream != nullptr) waiting += lane.stream->Waiting();
  }
  return static_cast<uint32_t>(waiting);
}

void NodeStreams::OnFailed(absl::Status why) { EndAll({.why = std::move(why), .by_shard = true}); }

void NodeStreams::EndAll(const End& end) {
  std::vector<std::shared_ptr<ServerStream>> streams;
  std::vector<SentFrames::Frames> unsent;  // released outside the lock
  {
    MutexLock lock(mutex_);
    if (end_) return;
    end_ = end;
    for (Lane& lane : lanes_) {
      streams.push_back(lane.stream);
      unsent.push_back(lane.sent.Clear());
    }
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
    const OpenFrame& open, const std::shared_ptr<ServerStream>& stream) {
  if (open.num_streams == 0 || open.num_streams > kMaxStreams || open.stream >= open.num_streams) {
    return absl::InvalidArgumentError(absl::StrCat("node opened stream ", open.stream, " of ",
                                                   open.num_streams, ", expected 1 to ",
                                                   kMaxStreams, " streams, counted from 0"));
  }
  MutexLock lock(mutex_);
  const NodeStreams::Key key{open.token, open.identity};
  std::erase_if(nodes_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<NodeStreams>& entry = nodes_[key];
  std::shared_ptr<NodeStreams> node = entry.lock();
  if (node == nullptr) {
    node = std::make_shared<NodeStreams>(key, open.num_streams, shard_, counters_);
    entry = node;
  }
  THALWEG_RETURN_IF_ERROR(node->Add(open, stream));
  return node;
}

void NodeTable::Release(NodeStreams& node, uint32_t index, const ServerStream& stream) {
  MutexLock lock(mutex_);
  if (node.Remove(index, stream)) nodes_.erase(node.key());
}

}  // namespace thalweg
