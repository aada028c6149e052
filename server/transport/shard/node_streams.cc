#include "server/transport/shard/node_streams.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/transport/shard/node_table.h"
#include "server/transport/shard/server_stream.h"

namespace thalweg {

NodeStreams::NodeStreams(Key key, NodeTable& table)
    : key_(std::move(key)), table_(table), counters_(table.counters()) {}

absl::Status NodeStreams::CheckLocked(const OpenFrame& open) const {
  if (open.num_streams != lanes_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("node opened stream ", open.stream, " of ",
                                                   open.num_streams, ", expected one of ",
                                                   lanes_.size(), " as it said before"));
  }
  const Lane& lane = lanes_[open.stream];
  if (lane.was_open && open.incarnation <= lane.incarnation) {
    return absl::AlreadyExistsError(
        absl::StrCat("node has stream ", open.stream, " of ", lanes_.size(), " open already"));
  }
  return absl::OkStatus();
}

absl::Status NodeStreams::Add(const OpenFrame& open, const std::shared_ptr<ServerStream>& stream) {
  std::shared_ptr<ServerStream> replaced = stream;
  SentFrames::Frames released;  // outside the lock
  auto turn = WriteQueue::Turn::kNothing;
  std::optional<End> end;
  {
    MutexLock lock(mutex_);
    if (lanes_.empty()) lanes_.resize(open.num_streams);
    THALWEG_RETURN_IF_ERROR(CheckLocked(open));
    Lane& lane = lanes_[open.stream];
    for (grpc::ByteBuffer& letter : TakeEarlyLocked(open.stream)) {
      if (open.incarnation > 0) lane.sent.Add(letter, /*counts=*/false);
      if (open.incarnation <= 1) turn = std::max(turn, stream->Queue(std::move(letter)));
    }
    if (open.incarnation > 1) {  // the earlier ones may have broken before they arrived here
      THALWEG_RETURN_IF_ERROR(lane.sent.Acknowledge(open.received, &released));
      turn = stream->Queue(EncodeResumed({lane.received.Tell()}));
      for (const grpc::ByteBuffer& frame : lane.sent.frames()) {
        turn = std::max(turn, stream->Queue(grpc::ByteBuffer(frame)));
      }
      ++reconnections_;
    }
    lane.was_open = true;
    lane.incarnation = open.incarnation;
    lane.stream.swap(replaced);
    end = end_;
  }
  if (open.incarnation > 1) counters_.resumed.Add(1);
  if (replaced != nullptr) {
    replaced->End(absl::AbortedError("the node has opened this stream again"));
  }
  stream->Take(turn);
  if (end) EndOne(*stream, *end);  // the node has ended before this stream came
  return absl::OkStatus();
}

void NodeStreams::Remove(uint32_t index, const ServerStream& stream) {
  std::shared_ptr<ServerStream> removed;  // released outside the lock
  MutexLock lock(mutex_);
  if (lanes_[index].stream.get() == &stream) removed.swap(lanes_[index].stream);
  if (!HasStreamLocked()) streamless_since_ = Now();
}

bool NodeStreams::HasStreamLocked() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.stream != nullptr; });
}

bool NodeStreams::HadStreamLocked() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.was_open; });
}

bool NodeStreams::IsGone(TimePoint now) const {
  MutexLock lock(mutex_);
  // A longer lease is for a stream that has broken.
  const Duration away = HadStreamLocked() ? key_.lease : kLease;
  const Duration patience = end_ ? away : std::max(away, NodeTable::kGoneTime);
  return !HasStreamLocked() && now - streamless_since_ > patience;
}

absl::Status NodeStreams::Contribute(uint32_t index, const ServerStream& from, ChunkFrame chunk) {
  const ChunkHeader& header = chunk.header;
  SentFrames::Frames released;  // outside the lock
  std::shared_ptr<ServerStream> stream;
  auto turn = WriteQueue::Turn::kNothing;
  {
    MutexLock lock(mutex_);
    const size_t expected = header.id.chunk % lanes_.size();
    if (index != expected) {
      return absl::InvalidArgumentError(absl::StrCat("node sent chunk ", header.id.chunk,
                                                     " on stream ", index, " of ", lanes_.size(),
                                                     ", expected it on stream ", expected));
    }
    Lane& lane = lanes_[index];
    if (lane.stream.get() != &from) return absl::OkStatus();
    lane.received.Add(chunk.payload.SizeBytes(), IsLetter(header.id));
    THALWEG_RETURN_IF_ERROR(lane.sent.Acknowledge(header.acknowledged, &released));
    if (lane.incarnation > 0 && lane.received.IsDue(lanes_.size())) {
      stream = lane.stream;
      turn = stream->Queue(EncodeAcknowledged({lane.received.Tell()}));
    }
  }
  if (stream != nullptr) stream->Take(turn);
  released.clear();
  counters_.received.Add(static_cast<double>(chunk.payload.SizeBytes()));
  if (header.kind == ChunkKind::kResult) {
    return member_->Supply(ToResult(header, std::move(chunk.payload)));
  }
  return member_->Contribute(ToContribution(header, std::move(chunk.payload)));
}

absl::Status NodeStreams::Acknowledged(uint32_t index, const ServerStream& from,
                                       uint64_t received) {
  SentFrames::Frames released;  // outside the lock
  MutexLock lock(mutex_);
  Lane& lane = lanes_[index];
  if (lane.stream.get() != &from) return absl::OkStatus();
  return lane.sent.Acknowledge(received, &released);
}

void NodeStreams::Refuse(const absl::Status& why) {
  const bool leaving = BeginLeave();
  EndAll({.why = why});
  if (leaving) EndMembership(why);
}

void NodeStreams::Leave(const absl::Status& reason) {
  if (BeginLeave()) EndMembership(reason);
}

void NodeStreams::EndMembership(const absl::Status& reason) {
  member_->Leave(reason);
  // Streams of a node that has been told of an end may still come, and are told it too.
  bool has_ended = false;
  {
    MutexLock lock(mutex_);
    has_ended = end_.has_value();
  }
  if (!has_ended) table_.Forget(key_.token);
}

void NodeStreams::Lost(uint32_t index, ServerStream& stream, const absl::Status& end) {
  std::shared_ptr<ServerStream> broken;
  {
    MutexLock lock(mutex_);
    Lane& lane = lanes_[index];
    const bool is_latest = lane.stream.get() == &stream;
    const bool may_come_back = end.ok() && lane.incarnation > 0 && !has_left_;
    if (is_latest && may_come_back) {
      broken.swap(lane.stream);
      if (!HasStreamLocked()) streamless_since_ = Now();
    }
    if (!is_latest) broken = stream.shared_from_this();
  }
  if (broken != nullptr) {
    broken->End(absl::OkStatus());
    return;
  }
  // Our own reason is sent before the failure that Leave causes, as in Refuse.
  if (!end.ok()) EndAll({.why = end});
  Leave(absl::UnavailableError("lost its connection to the shard"));
  stream.End(absl::OkStatus());
  EndAll({.why = absl::UnavailableError(absl::StrCat("stream ", index, " of the node has ended"))});
}

bool NodeStreams::KeepEarlyLocked(const RoundResult& result) {
  const bool is_open = !lanes_.empty() && lanes_[result.id.chunk % lanes_.size()].was_open;
  if (is_open || !IsLetter(result.id)) return false;
  early_.push_back(result);
  return true;
}

std::vector<grpc::ByteBuffer> NodeStreams::TakeEarlyLocked(uint32_t index) {
  std::vector<grpc::ByteBuffer> taken;
  std::vector<RoundResult> others;
  for (RoundResult& letter : std::exchange(early_, {})) {
    if (letter.id.chunk % lanes_.size() == index) {
      taken.push_back(EncodeChunk(HeaderOf(letter), letter.payload));
    } else {
      others.push_back(std::move(letter));
    }
  }
  early_.swap(others);
  return taken;
}

void NodeStreams::OnResult(RoundResult result) {
  size_t index = 0;
  uint64_t received = 0;
  {
    MutexLock lock(mutex_);
    if (end_ || KeepEarlyLocked(result) || lanes_.empty()) return;
    index = result.id.chunk % lanes_.size();
    received = lanes_[index].incarnation > 0 ? lanes_[index].received.Tell() : 0;
  }
  counters_.sent.Add(static_cast<double>(result.payload.SizeBytes()));
  const bool is_answer = !IsLetter(result.id);
  ChunkHeader header = HeaderOf(result);
  header.acknowledged = received;
  grpc::ByteBuffer frame = EncodeChunk(header, result.payload);
  std::shared_ptr<ServerStream> stream;
  auto turn = WriteQueue::Turn::kNothing;
  {
    MutexLock lock(mutex_);
    if (end_) return;
    Lane& lane = lanes_[index];
    if (lane.incarnation > 0) lane.sent.Add(frame, is_answer);
    stream = lane.stream;
    if (stream != nullptr) turn = stream->Queue(std::move(frame), is_answer);
    // A broken stream sends the result when it is opened again.
    if (stream == nullptr && lane.incarnation > 0) return;
  }
  if (stream != nullptr) {
    stream->Take(turn);
    return;
  }
  // A result answers a contribution, and this node's contribution came on that stream or never
  // came.
  EndAll(
      {.why = absl::InternalError(absl::StrCat(
           "chunk ", result.id.chunk, " has a result, but its stream, ", index, ", is not open"))});
}

uint64_t NodeStreams::Reconnections() const {
  MutexLock lock(mutex_);
  return reconnections_;
}

uint32_t NodeStreams::Backlog() const {
  MutexLock lock(mutex_);
  size_t waiting = 0;
  for (const Lane& lane : lanes_) {
    if (lane.stream != nullptr) waiting += lane.stream->WaitingAnswers();
  }
  return static_cast<uint32_t>(waiting);
}

ServedNode::Kept NodeStreams::KeptResults(uint32_t chunk) const {
  MutexLock lock(mutex_);
  if (lanes_.empty()) return {};
  return {static_cast<uint32_t>(lanes_.size()), lanes_[chunk % lanes_.size()].sent.counted()};
}

void NodeStreams::OnFailed(absl::Status why) { EndAll({.why = std::move(why), .by_shard = true}); }

void NodeStreams::EndAll(const End& end) {
  std::vector<std::shared_ptr<ServerStream>> streams;
  std::vector<SentFrames::Frames> unsent;  // released outside the lock
  std::vector<RoundResult> early;
  {
    MutexLock lock(mutex_);
    if (end_) return;
    end_ = end;
    early.swap(early_);
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

}  // namespace thalweg
