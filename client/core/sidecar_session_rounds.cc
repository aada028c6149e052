// This file takes a session's buckets through their rounds, from the announcement to the results.

#include <future>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/sidecar_session.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"

namespace thalweg {
namespace {

void Count(const ipc::Complete& m, SessionStats* stats) {
  ++stats->rounds;
  if (m.workers > 0) stats->workers = m.workers;  // none in a pull
  stats->wire_bytes_sent += m.wire_bytes_sent;
  stats->wire_bytes_received += m.wire_bytes_received;
  stats->link_bytes_sent += m.link_bytes_sent;
  stats->nonfinite_elems += m.nonfinite_elems;
  stats->reduce_seconds += static_cast<double>(m.reduce_ns) * 1e-9;
  stats->wait_seconds += static_cast<double>(m.wait_ns) * 1e-9;
  stats->wire_seconds += static_cast<double>(m.wire_ns) * 1e-9;
  stats->decode_seconds += static_cast<double>(m.decode_ns) * 1e-9;
  stats->compressed_since = m.compressed_since;
  stats->residual_norm = m.residual_norm;
  stats->error_ratio = m.error_ratio;
}

}  // namespace

absl::Status SidecarSession::Announce(BucketId id, const BucketLayout& layout,
                                      const std::optional<UpdateRule>& update) {
  THALWEG_RETURN_IF_ERROR(CheckProcess());
  auto bucket = std::make_unique<SessionBucket>();
  bucket->layout = layout;
  bucket->has_update = update.has_value();
  bucket->elems = layout.Elems();
  bucket->dtype = layout.dtype;
  bucket->share = ShareType(layout.dtype, options_.codec, options_.local_size, path());
  bucket->plan = update ? PlanOfUpdated(layout, FormatOf(layout.dtype), welcome_.chunk_bytes,
                                        welcome_.num_shards)
                        : ChunkPlan::For(bucket->elems, layout.dtype, FormatOf(layout.dtype),
                                         welcome_.chunk_bytes, welcome_.num_shards);
  THALWEG_ASSIGN_OR_RETURN(
      BucketArena arena,
      BucketArena::Create("thalweg-gradient",
                          UsesArenas() ? bucket->elems * SizeOf(bucket->share) : 0, true));
  bucket->input = std::make_shared<BucketArena>(std::move(arena));
  ipc::RegisterBucket message{id, layout, {}, update};
  if (path_ != nullptr) {
    auto lane = path_->OpenLane(bucket->input, bucket->elems * SizeOf(bucket->share));
    if (absl::IsResourceExhausted(lane.status()) && options_.free_device_memory != nullptr) {
      options_.free_device_memory();
      lane = path_->OpenLane(bucket->input, bucket->elems * SizeOf(bucket->share));
    }
    THALWEG_RETURN_IF_ERROR(lane.status());
    bucket->lane = *std::move(lane);
    message.memory = bucket->lane->memory();
  }
  const int fd = bucket->input->fd();
  // The last layout's bucket is freed without the lock, because the device may have to wait.
  std::pair<BucketId, std::unique_ptr<SessionBucket>> replaced = {id, std::move(bucket)};
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(status_);
    auto& slot = buckets_[id.index];
    if (slot.second != nullptr && slot.second->callback.done != nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "bucket ", ToString(id), " was registered while a round of it is in flight"));
    }
    std::swap(slot, replaced);
    if (replaced.second != nullptr && !UsesArenas()) {
      slot.second->old_lane = std::move(replaced.second->lane);
    }
    if (!is_away_) connection = connection_;
    slot.second->is_announced = connection != nullptr;
  }
  return TellNoted(connection, message, fd);
}

absl::StatusOr<ReducedBucket> SidecarSession::Reduce(BucketId id,
                                                     std::span<const std::byte> gradient) {
  // The promise is shared: its setter may still be inside set_value when the waiter has returned.
  const auto outcome = std::make_shared<std::promise<absl::StatusOr<ReducedBucket>>>();
  const auto set = [outcome](absl::StatusOr<ReducedBucket> reduced) {
    outcome->set_value(std::move(reduced));
  };
  Start(id, gradient, /*notes=*/{}, {set, SessionCallback::On::kProgressThread});
  // The wait is bounded: a session fails rounds in flight after its timeout.
  return outcome->get_future().get();
}

void SidecarSession::Start(BucketId id, std::span<const std::byte> gradient, Notes notes,
                           SessionCallback callback) {
  ipc::Submit submit{.id = id,
                     .unused = std::move(notes.unused),
                     .settings = notes.settings,
                     .waited_ns = notes.waited_ns};
  const auto begun = BeginRound(std::move(submit), gradient.size(), nullptr, callback);
  if (!begun.ok()) {
    Refuse(std::move(callback.done), begun.status());
    return;
  }
  SessionBucket& bucket = *begun->bucket;
  // A bucket of several chunks is announced before it is copied, so that the sidecar works on the
  // first chunks meanwhile; a single chunk is copied before.
  const bool copies_first = bucket.plan.Count() == 1;
  if (copies_first) CopyIn(id, bucket, gradient);
  const absl::Status sent = TellNoted(begun->connection, bucket.submit);
  if (!sent.ok()) {
    Fail(sent);
    return;
  }
  if (!copies_first) CopyIn(id, bucket, gradient);
}

void SidecarSession::StartWithoutGradient(BucketId id, uint64_t settings, UpdateRound kind,
                                          Done done) {
  SessionCallback callback{std::move(done), SessionCallback::On::kCompletionThread};
  const auto begun =
      BeginRound({.id = id, .settings = settings, .kind = kind}, std::nullopt, nullptr, callback);
  if (!begun.ok()) return Refuse(std::move(callback.done), begun.status());
  const absl::Status sent = TellNoted(begun->connection, begun->bucket->submit);
  if (!sent.ok()) Fail(sent);
}

void SidecarSession::Refuse(Done done, absl::Status why) {
  if (fork_guard_.InChild()) return done(std::move(why));
  completions_.Add(completions_.LaneHere(),
                   [done = std::move(done), why = std::move(why)] { done(why); });
}

absl::StatusOr<SidecarSession::Begun> SidecarSession::BeginRound(ipc::Submit submit,
                                                                 std::optional<size_t> bytes,
                                                                 DeviceGradient* gradient,
                                                                 SessionCallback& callback) {
  const BucketId id = submit.id;
  THALWEG_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(status_);
  if ((gradient != nullptr) != (path_ != nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "bucket ", ToString(id), " is in ", gradient == nullptr ? "host" : "a device's",
        " memory, but the session was connected for gradients in ",
        path_ == nullptr ? "host" : "a device's", " memory: connect another one for these"));
  }
  const auto found = buckets_.find(id.index);
  if (found == buckets_.end() || found->second.first != id) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", ToString(id), " is not registered"));
  }
  SessionBucket& bucket = *found->second.second;
  if (bytes && *bytes != bucket.elems * SizeOf(bucket.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id), " has ",
                                                   bucket.elems * SizeOf(bucket.dtype),
                                                   " bytes, got ", *bytes));
  }
  if (bucket.callback.done != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "bucket ", ToString(id), " was submitted while its round ", bucket.round, " is in flight"));
  }
  ++bucket.round;
  // All buckets have had their rounds of a step before.
  if (bucket.round >= bucket.loaded_at + 2) has_loaded_ = false;
  bucket.callback = std::move(callback);
  bucket.callback.lane = completions_.LaneHere();
  if (gradient != nullptr) bucket.gradient = *gradient;
  bucket.submitted = bucket.filled = last_progress_ = Now();
  bucket.chunks_seen = 0;
  bucket.input->ResetReady();
  stats_.raw_bytes += bytes.value_or(0);
  bucket.submit = std::move(submit);
  bucket.submit.round = bucket.round;
  return Begun{&bucket, is_away_ ? nullptr : connection_};
}

void SidecarSession::CopyIn(BucketId id, SessionBucket& bucket,
                            std::span<const std::byte> gradient) {
  const TimePoint start = Now();
  const uint32_t chunks = bucket.plan.Count();
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const uint64_t begin = bucket.plan.Begin(chunk);
    Cast(bucket.dtype, gradient.data() + begin * SizeOf(bucket.dtype), bucket.share,
         bucket.input->payload() + begin * SizeOf(bucket.share), bucket.plan.Elems(chunk));
    if (trace_ && chunk + 1 == chunks) TraceCopyIn(id, bucket, start);
    bucket.input->PublishReady(chunk + 1);
  }
  MutexLock lock(mutex_);
  stats_.copy_seconds += ToSeconds(Now() - start);
}

absl::Status SidecarSession::OnReady(const ipc::BucketReady& ready, UniqueFd fd) {
  std::shared_ptr<DevicePath::Lane> old_lane;  // freed after the lock, for which others wait
  MutexLock lock(mutex_);
  const auto found = buckets_.find(ready.id.index);
  // The message answers a layout that has been replaced in the meantime.
  if (found == buckets_.end() || found->second.first != ready.id) return absl::OkStatus();
  SessionBucket& bucket = *found->second.second;
  const uint64_t bytes = UsesArenas() ? bucket.elems * SizeOf(bucket.dtype) : 0;
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Open(std::move(fd), bytes));
  if (bucket.lane != nullptr) {
    THALWEG_RETURN_IF_ERROR(path_->SetResult(*bucket.lane, ready.memory));
    old_lane = std::move(bucket.old_lane);
  }
  bucket.result = std::make_shared<const BucketArena>(std::move(arena));
  return absl::OkStatus();
}

void SidecarSession::OnPlaced(ipc::Placed message) {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(message.id.index);
  if (found == buckets_.end() || found->second.first != message.id) return;
  found->second.second->placed = std::move(message);
}

void SidecarSession::OnCodecMemory(const ipc::CodecMemory& message, UniqueFd fd) {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(message.id.index);
  if (found == buckets_.end() || found->second.first != message.id) return;
  found->second.second->codec_memory = message;
  found->second.second->codec_memory_fd = std::make_shared<const UniqueFd>(std::move(fd));
}

absl::Status SidecarSession::Finish(const ipc::Complete& m) {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(m.id.index);
  if (found == buckets_.end() || found->second.first != m.id ||
      found->second.second->round != m.round || found->second.second->callback.done == nullptr ||
      found->second.second->result == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("the sidecar completed round ", m.round,
                                                   " of bucket ", ToString(m.id),
                                                   ", which is not in flight"));
  }
  SessionBucket& bucket = *found->second.second;
  const TimePoint now = Now();
  last_progress_ = now;
  bucket.nonfinite_elems = m.nonfinite_elems;
  Count(m, &stats_);
  stats_.total_seconds += ToSeconds(now - bucket.submitted);
  const BucketArena& arena = *bucket.result;
  ReducedBucket reduced{{arena.payload(), arena.payload_bytes()}, bucket.result};
  reduced.nonfinite_elems = m.nonfinite_elems;
  reduced.squares = m.squares;
  SessionCallback callback = std::exchange(bucket.callback, {});
  std::optional<SessionLanding> landing;
  if (bucket.lane != nullptr) {
    landing = {bucket.lane, bucket.result, std::exchange(bucket.gradient, {})};
  }
  std::optional<TraceSubject> what;
  if (trace_) what = Describe(m.id, bucket);
  if (what) trace_.Wait("wait", bucket.filled, now, *what);
  if (callback.thread == SessionCallback::On::kProgressThread) {
    callback.done(std::move(reduced));
    if (what) trace_.Work("copy_out", now, Now(), *std::move(what));
  } else {
    completions_.Add(callback.lane,
                     [this, done = std::move(callback.done),
                      outcome = absl::StatusOr<ReducedBucket>(std::move(reduced)),
                      landing = std::move(landing), what = std::move(what)]() mutable {
                       const TimePoint start = Now();
                       if (landing) outcome = Land(*landing);
                       done(std::move(outcome));
                       if (what) trace_.Work("copy_out", start, Now(), *std::move(what));
                     });
  }
  return absl::OkStatus();
}

}  // namespace thalweg
