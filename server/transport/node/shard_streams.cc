#include "server/transport/node/shard_streams.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/transport/proofs.h"
#include "server/transport/wire/status_codec.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

// A stream is opened at most once in this time: what ends it may need no time at all.
constexpr Duration kPauseOfLane = std::chrono::milliseconds(100);
// This long before it gives up, a node asks why there is no connection.
constexpr Duration kAskingTime = std::chrono::seconds(1);

// Says whether a stream ended because its connection did, and not because the shard ended it.
bool IsBroken(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return !IsOurs(status);
    default:
      return false;
  }
}

// Says whether a stream ended because the node itself did not wait any longer.
bool IsPatienceOver(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::CANCELLED && !IsOurs(status);
}

}  // namespace

std::shared_ptr<ShardStreams> ShardStreams::Open(Options options,
                                                 std::shared_ptr<MemberEvents> events,
                                                 StreamCounters counters) {
  std::shared_ptr<ShardStreams> all(
      new ShardStreams(std::move(options), std::move(events), counters));
  const std::vector<Connection>& connections = all->options_.connections;
  {
    MutexLock lock(all->done_->mutex);
    all->done_->streams_left = connections.size();
  }
  std::vector<std::shared_ptr<ClientStream>> streams;
  {
    MutexLock lock(all->mutex_);
    all->self_ = all;
    for (uint32_t i = 0; i < connections.size(); ++i) {
      Lane& lane = all->lanes_[i];
      lane.incarnation = all->is_resumable() ? 1 : 0;
      lane.stream = std::make_shared<ClientStream>(*all, i);
      lane.stream->Prepare(connections[i].channel, *connections[i].queue, all->OpenFor(i, lane));
      streams.push_back(lane.stream);
    }
  }
  // Streams start only when all are prepared: one that fails cancels the others from another
  // thread.
  for (const auto& stream : streams) stream->Start();
  return all;
}

OpenFrame ShardStreams::OpenFor(uint32_t index, const Lane& lane) const {
  const Ticket& ticket = options_.ticket;
  OpenFrame open{.token = ticket.token,
                 .stream = index,
                 .num_streams = static_cast<uint32_t>(options_.connections.size()),
                 .identity = ticket.identity,
                 .incarnation = lane.incarnation,
                 .received = lane.received.count()};
  if (ticket.signer != nullptr) open.proof = ticket.signer->Sign(StreamStatement(open));
  return open;
}

absl::Status ShardStreams::Send(ChunkHeader header, const Payload& payload) {
  const auto index = static_cast<uint32_t>(header.id.chunk % options_.connections.size());
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (events_ == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("the node has left ", options_.peer));
    }
    if (is_resumable()) header.acknowledged = lanes_[index].received.Tell();
  }
  const size_t payload_bytes = payload.SizeBytes();
  if (payload_bytes > kMaxPayloadBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a chunk of ", payload_bytes, " bytes, expected at most ", kMaxPayloadBytes));
  }
  counters_.sent.Add(static_cast<double>(payload_bytes));
  grpc::ByteBuffer frame = EncodeChunk(header, payload);
  std::shared_ptr<ClientStream> stream;
  WriteQueue::Turn turn;
  {
    MutexLock lock(mutex_);
    // The failure has been reported, or the node is leaving.
    if (is_closed_) return absl::OkStatus();
    Lane& lane = lanes_[index];
    if (is_resumable()) lane.sent.Add(frame);
    if (!lane.is_live) return absl::OkStatus();  // it is sent when the stream has resumed
    stream = lane.stream;
    turn = stream->Queue(std::move(frame));
  }
  stream->Take(turn);
  return absl::OkStatus();
}

void ShardStreams::Detach() {
  std::shared_ptr<MemberEvents> events;  // released outside the lock
  MutexLock lock(mutex_);
  events.swap(events_);
}

std::vector<std::shared_ptr<ClientStream>> ShardStreams::Close() {
  std::vector<std::shared_ptr<ClientStream>> streams;
  std::vector<SentFrames::Frames> unsent;  // released outside the lock
  MutexLock lock(mutex_);
  is_closed_ = true;
  for (Lane& lane : lanes_) {
    streams.push_back(lane.stream);
    unsent.push_back(lane.sent.Clear());
  }
  return streams;
}

void ShardStreams::Finish() {
  for (const auto& stream : Close()) stream->Finish();
}

void ShardStreams::Cancel() {
  for (const auto& stream : Close()) stream->Cancel();
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

void ShardStreams::Receive(uint32_t index, grpc::ByteBuffer&& bytes) {
  const absl::Status status = Handle(index, std::move(bytes));
  if (status.ok()) return;
  Fail(status);
  Cancel();
}

absl::Status ShardStreams::Handle(uint32_t index, grpc::ByteBuffer&& bytes) {
  absl::StatusOr<ParsedFrame> parsed = ParseFrame(std::move(bytes));
  if (!parsed.ok()) {
    return Prefixed(absl::StrCat(options_.peer, " sent a frame"), parsed.status());
  }
  if (const auto* failure = std::get_if<FailureFrame>(&*parsed)) return failure->why;
  if (const auto* resumed = std::get_if<ResumedFrame>(&*parsed)) {
    return Prefixed(options_.peer, HandleResumed(index, *resumed));
  }
  if (const auto* acknowledged = std::get_if<AcknowledgedFrame>(&*parsed)) {
    return Prefixed(options_.peer, HandleAcknowledged(index, acknowledged->received));
  }
  if (auto* chunk = std::get_if<ChunkFrame>(&*parsed)) {
    return Prefixed(options_.peer, HandleChunk(index, std::move(*chunk)));
  }
  return absl::InvalidArgumentError(absl::StrCat(options_.peer, " sent an open frame"));
}

absl::Status ShardStreams::HandleChunk(uint32_t index, ChunkFrame&& chunk) {
  counters_.received.Add(static_cast<double>(chunk.payload.SizeBytes()));
  const ChunkHeader& header = chunk.header;
  if (header.kind != ChunkKind::kResult) {
    return absl::InvalidArgumentError("sent a contribution, expected results only");
  }
  std::shared_ptr<MemberEvents> events;
  SentFrames::Frames released;  // outside the lock, and before OnResult may reuse their memory
  std::shared_ptr<ClientStream> stream;
  auto turn = WriteQueue::Turn::kNothing;
  {
    MutexLock lock(mutex_);
    events = events_;
    Lane& lane = lanes_[index];
    lane.received.Add(chunk.payload.SizeBytes(), IsLetter(header.id));
    if (!lane.is_live) {
      return absl::InvalidArgumentError("sent a chunk before it resumed the stream");
    }
    if (!is_closed_ && is_resumable()) {
      THALWEG_RETURN_IF_ERROR(lane.sent.Acknowledge(header.acknowledged, &released));
      if (lane.received.IsDue(lanes_.size())) {
        stream = lane.stream;
        turn = stream->Queue(EncodeAcknowledged({lane.received.Tell()}));
      }
    }
  }
  if (stream != nullptr) stream->Take(turn);
  released.clear();
  if (events != nullptr) events->OnResult(ToResult(header, std::move(chunk.payload)));
  return absl::OkStatus();
}

absl::Status ShardStreams::HandleAcknowledged(uint32_t index, uint64_t received) {
  SentFrames::Frames released;  // outside the lock
  MutexLock lock(mutex_);
  if (is_closed_) return absl::OkStatus();
  Lane& lane = lanes_[index];
  if (!lane.is_live) return absl::InvalidArgumentError("acknowledged before it resumed the stream");
  return lane.sent.Acknowledge(received, &released);
}

absl::Status ShardStreams::HandleResumed(uint32_t index, const ResumedFrame& resumed) {
  SentFrames::Frames released;  // outside the lock
  std::shared_ptr<ClientStream> stream;
  auto turn = WriteQueue::Turn::kNothing;
  {
    MutexLock lock(mutex_);
    if (is_closed_) return absl::OkStatus();
    Lane& lane = lanes_[index];
    if (lane.is_live) return absl::InvalidArgumentError("resumed a stream that had not broken");
    THALWEG_RETURN_IF_ERROR(lane.sent.Acknowledge(resumed.received, &released));
    lane.is_live = true;
    stream = lane.stream;
    for (const grpc::ByteBuffer& frame : lane.sent.frames()) {
      turn = std::max(turn, stream->Queue(grpc::ByteBuffer(frame)));
    }
    spdlog::info("{}: connected again after {:.1f} s; {} chunks are sent again", options_.peer,
                 ToSeconds(Now() - lane.lost), lane.sent.frames().size());
  }
  counters_.resumed.Add(1);
  stream->Keep();
  stream->Take(turn);
  return absl::OkStatus();
}

void ShardStreams::Fail(const absl::Status& why) {
  std::shared_ptr<MemberEvents> events;
  {
    MutexLock lock(mutex_);
    if (events_ == nullptr) return;
    events.swap(events_);
    failure_ = why;
  }
  events->OnFailed(why);
  Cancel();
}

bool ShardStreams::Reopen(uint32_t index, const grpc::Status& status) {
  if (!is_resumable() || !IsBroken(status)) return false;
  std::shared_ptr<ClientStream> stream;
  const Connection& connection = options_.connections[index];
  Duration pause{};
  {
    MutexLock lock(mutex_);
    if (is_closed_ || events_ == nullptr) return false;
    Lane& lane = lanes_[index];
    const TimePoint now = Now();
    if (lane.is_live) {
      lane.is_live = false;
      lane.is_asking = false;
      lane.reason.clear();
      lane.lost = now;
      lane.cause = status.error_message();
      spdlog::warn("{}: lost the connection ({}); trying to connect again for {:g} s",
                   options_.peer, lane.cause, ToSeconds(options_.grace));
    }
    const TimePoint give_up = lane.lost + options_.grace;
    if (lane.is_asking && lane.reason.empty() && !IsPatienceOver(status)) {
      lane.reason = status.error_message();
    }
    const Duration asking = std::min(kAskingTime, options_.grace / 5);
    const bool has_asked = lane.is_asking || !lane.reason.empty() || !IsPatienceOver(status);
    if (now >= give_up && has_asked) return false;
    const TimePoint ask_at = give_up - asking;
    lane.is_asking = now >= ask_at && lane.reason.empty();
    pause = Remaining(lane.opened + kPauseOfLane, now);
    lane.opened = now + pause;
    ++lane.incarnation;
    lane.broken = std::exchange(lane.stream, std::make_shared<ClientStream>(*this, index));
    stream = lane.stream;
    stream->PrepareAgain(connection.channel, *connection.queue, OpenFor(index, lane),
                         !lane.is_asking, now < ask_at ? ask_at : std::max(give_up, now + asking));
  }
  if (pause > Duration::zero()) {
    stream->StartAfter(pause, *connection.queue);
  } else {
    stream->Start();
  }
  return true;
}

absl::Status ShardStreams::LostStream(uint32_t index, const grpc::Status& status) {
  const std::string& peer = options_.peer;
  if (status.ok()) return absl::UnavailableError(absl::StrCat(peer, " has closed the stream"));
  const std::string& message = status.error_message();
  MutexLock lock(mutex_);
  const Lane& lane = lanes_[index];
  if (!lane.is_live) {
    const std::string end = IsOurs(status) ? "the shard does not take it back: "
                                           : absl::StrCat("it has not come back within ",
                                                          ToSeconds(options_.grace), " s: ");
    const std::string& why = IsPatienceOver(status) ? lane.reason : message;
    const bool is_forgotten = IsOurs(status) && absl::IsNotFound(FromGrpc(status));
    return absl::Status(is_forgotten ? absl::StatusCode::kNotFound : absl::StatusCode::kUnavailable,
                        absl::StrCat("lost the connection to ", peer, ": ", lane.cause, "; ", end,
                                     why.empty() ? "nothing answers" : why));
  }
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
      status.error_code() == grpc::StatusCode::CANCELLED) {
    return absl::UnavailableError(absl::StrCat("lost the connection to ", peer, ": ", message));
  }
  return Prefixed(peer, FromGrpc(status));
}

void ShardStreams::StreamDone(uint32_t index, const grpc::Status& status) {
  if (Reopen(index, status)) return;
  Fail(LostStream(index, status));
  const std::shared_ptr<Done> done = done_;
  MutexLock lock(done->mutex);
  --done->streams_left;
  done->changed.NotifyAll();
}

}  // namespace thalweg
