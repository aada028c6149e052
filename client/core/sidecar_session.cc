#include "client/core/sidecar_session.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"

namespace thalweg {
namespace {

// The progress thread checks deadlines at this interval while no message arrives.
constexpr Duration kLookAtSidecar = std::chrono::milliseconds(250);
// Writing the rest of a trace may take this long.
constexpr Duration kTraceTime = std::chrono::seconds(2);

void Count(const ipc::Complete& m, SessionStats* stats) {
  ++stats->rounds;
  if (m.workers > 0) stats->workers = m.workers;  // none in a pull
  stats->wire_bytes_sent += m.wire_bytes_sent;
  stats->wire_bytes_received += m.wire_bytes_received;
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
  auto bucket = std::make_unique<Bucket>();
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
    THALWEG_ASSIGN_OR_RETURN(bucket->lane,
                             path_->OpenLane(bucket->input, bucket->elems * SizeOf(bucket->share)));
    message.memory = bucket->lane->memory();
  }
  const int fd = bucket->input->fd();
  // The last layout's bucket is freed without the lock, because the device may have to wait.
  std::pair<BucketId, std::unique_ptr<Bucket>> replaced = {id, std::move(bucket)};
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

absl::Status SidecarSession::Tell(const ipc::Message& message, int fd) {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !is_away_ || !status_.ok();
    });
    THALWEG_RETURN_IF_ERROR(status_);
    connection = connection_;
  }
  return Explain(connection->Send(message, fd));
}

absl::Status SidecarSession::TellNoted(const std::shared_ptr<Connection>& connection,
                                       const ipc::Message& message, int fd) {
  if (connection == nullptr) return absl::OkStatus();
  const absl::Status sent = connection->Send(message, fd);
  if (!absl::IsUnavailable(sent)) return sent;
  // The progress thread notices too, and fails or leaves for the next process.
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, Now() + options_.timeout, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !status_.ok() || is_away_ || connection_ != connection;
  });
  return status_;
}

absl::Status SidecarSession::Explain(absl::Status sent) {
  if (!absl::IsUnavailable(sent)) return sent;
  MutexLock lock(mutex_);
  changed_.WaitUntil(mutex_, Now() + options_.timeout,
                     [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !status_.ok(); });
  return status_.ok() ? sent : status_;
}

absl::StatusOr<ReducedBucket> SidecarSession::Reduce(BucketId id,
                                                     std::span<const std::byte> gradient) {
  // The promise is shared: its setter may still be inside set_value when the waiter has returned.
  const auto outcome = std::make_shared<std::promise<absl::StatusOr<ReducedBucket>>>();
  const auto set = [outcome](absl::StatusOr<ReducedBucket> reduced) {
    outcome->set_value(std::move(reduced));
  };
  Start(id, gradient, /*notes=*/{}, {set, CallOn::kProgressThread});
  // The wait is bounded: a session fails rounds in flight after its timeout.
  return outcome->get_future().get();
}

void SidecarSession::Start(BucketId id, std::span<const std::byte> gradient, Notes notes,
                           Callback callback) {
  ipc::Submit submit{.id = id,
                     .unused = std::move(notes.unused),
                     .settings = notes.settings,
                     .waited_ns = notes.waited_ns};
  const auto begun = BeginRound(std::move(submit), gradient.size(), nullptr, callback);
  if (!begun.ok()) {
    Refuse(std::move(callback.done), begun.status());
    return;
  }
  Bucket& bucket = *begun->bucket;
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
  Callback callback{std::move(done), CallOn::kCompletionThread};
  const auto begun =
      BeginRound({.id = id, .settings = settings, .kind = kind}, std::nullopt, nullptr, callback);
  if (!begun.ok()) return Refuse(std::move(callback.done), begun.status());
  const absl::Status sent = TellNoted(begun->connection, begun->bucket->submit);
  if (!sent.ok()) Fail(sent);
}

void SidecarSession::Refuse(Done done, absl::Status why) {
  completions_.Add(completions_.LaneHere(),
                   [done = std::move(done), why = std::move(why)] { done(why); });
}

template <typename Call>
void SidecarSession::Begin(Call call, const Collectives::Done& done) {
  absl::Status begun = status();
  if (begun.ok()) {
    begun = Explain(collectives_.Start(std::move(call), completions_.LaneHere(), done));
  }
  if (!begun.ok()) return done(begun);
  FailCollectives();  // if it has failed in between
}

void SidecarSession::Collect(CollectiveCall call, std::function<void(absl::Status)> done) {
  Begin(std::move(call), done);
}

void SidecarSession::Exchange(PeerCall call, std::function<void(absl::Status)> done) {
  Begin(std::move(call), done);
}

void SidecarSession::FailCollectives() {
  const absl::Status why = status();
  if (why.ok()) return;
  for (auto& [lane, done] : collectives_.TakeAll()) {
    completions_.Add(lane, [done = std::move(done), why] { done(why); });
  }
}

absl::StatusOr<SidecarSession::Begun> SidecarSession::BeginRound(ipc::Submit submit,
                                                                 std::optional<size_t> bytes,
                                                                 DeviceGradient* gradient,
                                                                 Callback& callback) {
  const BucketId id = submit.id;
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
  Bucket& bucket = *found->second.second;
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

void SidecarSession::CopyIn(BucketId id, Bucket& bucket, std::span<const std::byte> gradient) {
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

void SidecarSession::ProgressLoop() {
  if (path_ != nullptr) {
    if (const absl::Status bound = options_.device->BindThread(); !bound.ok()) FailForAll(bound);
  }
  while (true) {
    auto received = connection()->Receive(
        Now() + std::min<Duration>(kLookAtSidecar, options_.timeout / kSignsOfLife));
    absl::Status status = received.status();
    {
      MutexLock lock(mutex_);
      if (received.ok()) last_heard_ = Now();
      if (parts_in_order_) {
        // The session has failed: all further messages are ignored until the end.
        if (!absl::IsUnavailable(status)) continue;
        sidecar_hung_up_ = true;
        changed_.NotifyAll();
        return;
      }
    }
    if (received.ok()) {
      states_.OnMessage();
      status = Handle(*std::move(received));
      if (status.ok()) status = ShowLife(Now());
    } else if (absl::IsDeadlineExceeded(status)) {
      status = path_ == nullptr ? absl::OkStatus() : path_->Check();
      if (!status.ok()) FailForAll(status);
      if (status.ok()) status = ShowLife(Now());
      if (status.ok()) status = CheckProgress(Now());
    } else if (absl::IsUnavailable(status)) {
      status = absl::UnavailableError(absl::StrCat("job '", options_.job, "': the sidecar at ",
                                                   options_.sidecar_path,
                                                   " is gone: ", status.message()));
      status = Return(status);
    }
    if (!status.ok()) {
      Fail(status);
      return;
    }
  }
}

absl::Status SidecarSession::CheckIdle() const {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(status_);
  for (const auto& [index, entry] : buckets_) {
    if (entry.second->callback.done == nullptr) continue;
    return absl::FailedPreconditionError(absl::StrCat("bucket ", ToString(entry.first),
                                                      " is being reduced: save or load the codec's "
                                                      "state between two steps"));
  }
  return absl::OkStatus();
}

absl::Status SidecarSession::SaveCodecState(
    const std::function<void(std::span<const std::byte>)>& use) {
  THALWEG_RETURN_IF_ERROR(CheckIdle());
  THALWEG_ASSIGN_OR_RETURN(const BucketArena arena, states_.GetCodecState());
  use({arena.payload(), arena.payload_bytes()});
  return absl::OkStatus();
}

absl::Status SidecarSession::LoadCodecState(std::span<const std::byte> state) {
  THALWEG_RETURN_IF_ERROR(CheckIdle());
  return states_.SetCodecState(state);
}

void SidecarSession::NotePrecision(double loss_scale, uint64_t skipped_steps) {
  {
    MutexLock lock(mutex_);
    if (!status_.ok() || (skipped_steps == 0 && loss_scale == stats_.loss_scale)) return;
    stats_.loss_scale = loss_scale;
    stats_.skipped_steps += skipped_steps;
  }
  if (options_.local_rank != 0) return;
  const absl::Status sent = Tell(ipc::Precision{loss_scale, skipped_steps});
  if (!sent.ok()) Fail(sent);
}

absl::Status SidecarSession::Handle(Received received) {
  if (const auto* complete = std::get_if<ipc::Complete>(&received.message))
    return Finish(*complete);
  if (const auto* fail = std::get_if<ipc::Fail>(&received.message)) {
    return absl::Status(fail->code, fail->message);
  }
  if (std::holds_alternative<ipc::Alive>(received.message)) return absl::OkStatus();
  if (auto* placed = std::get_if<ipc::Placed>(&received.message)) {
    OnPlaced(std::move(*placed));
    return absl::OkStatus();
  }
  if (const auto* ready = std::get_if<ipc::BucketReady>(&received.message)) {
    return OnReady(*ready, std::move(received.fd));
  }
  if (const auto* state = std::get_if<ipc::CodecState>(&received.message)) {
    return states_.OnCodecState(*state, std::move(received.fd));
  }
  if (const auto* weights = std::get_if<ipc::Weights>(&received.message)) {
    return states_.OnWeights(*weights, std::move(received.fd));
  }
  if (const auto* snapshots = std::get_if<ipc::Snapshots>(&received.message)) {
    states_.OnSnapshots(*snapshots);
    return absl::OkStatus();
  }
  if (const auto* taken = std::get_if<ipc::WeightsTaken>(&received.message)) {
    states_.OnWeightsTaken(*taken);
    return absl::OkStatus();
  }
  if (const auto* arena = std::get_if<ipc::ShareArena>(&received.message)) {
    return collectives_.OnShareArena(*arena, std::move(received.fd));
  }
  if (auto* collected = std::get_if<ipc::Collected>(&received.message)) {
    THALWEG_ASSIGN_OR_RETURN(auto all, collectives_.OnCollected(std::move(*collected)));
    for (auto& finished : all) {
      const int lane = finished.lane;
      completions_.Add(lane,
                       [this, finished = std::move(finished)] { collectives_.Finish(finished); });
    }
    return absl::OkStatus();
  }
  if (const auto* part = std::get_if<ipc::CollectedPart>(&received.message)) {
    return collectives_.OnCollectedPart(*part);
  }
  if (const auto* taken = std::get_if<ipc::Taken>(&received.message)) {
    return collectives_.OnTaken(*taken);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the sidecar sent an unexpected ", Name(received.message)));
}

absl::Status SidecarSession::OnReady(const ipc::BucketReady& ready, UniqueFd fd) {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(ready.id.index);
  // The message answers a layout that has been replaced in the meantime.
  if (found == buckets_.end() || found->second.first != ready.id) return absl::OkStatus();
  Bucket& bucket = *found->second.second;
  const uint64_t bytes = UsesArenas() ? bucket.elems * SizeOf(bucket.dtype) : 0;
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Open(std::move(fd), bytes));
  if (bucket.lane != nullptr) {
    THALWEG_RETURN_IF_ERROR(path_->SetResult(*bucket.lane, ready.memory));
    bucket.old_lane.reset();
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
  Bucket& bucket = *found->second.second;
  const TimePoint now = Now();
  last_progress_ = now;
  bucket.nonfinite_elems = m.nonfinite_elems;
  Count(m, &stats_);
  stats_.total_seconds += ToSeconds(now - bucket.submitted);
  const BucketArena& arena = *bucket.result;
  ReducedBucket reduced{{arena.payload(), arena.payload_bytes()}, bucket.result};
  reduced.nonfinite_elems = m.nonfinite_elems;
  reduced.squares = m.squares;
  Callback callback = std::exchange(bucket.callback, {});
  std::optional<Landing> landing;
  if (bucket.lane != nullptr) {
    landing = {bucket.lane, bucket.result, std::exchange(bucket.gradient, {})};
  }
  std::optional<TraceSubject> what;
  if (trace_) what = Describe(m.id, bucket);
  if (what) trace_.Wait("wait", bucket.filled, now, *what);
  if (callback.thread == CallOn::kProgressThread) {
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

absl::Status SidecarSession::ShowLife(TimePoint now) {
  if (now - last_life_ < options_.timeout / kSignsOfLife) return absl::OkStatus();
  last_life_ = now;
  const absl::Status sent = connection()->Send(ipc::Alive{});
  // What was received before the connection closed tells why.
  return absl::IsUnavailable(sent) ? absl::OkStatus() : sent;
}

absl::Status SidecarSession::CheckProgress(TimePoint now) {
  if (const std::string late = collectives_.Late(now); !late.empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat("job '", options_.job, "': ", late, " did not complete within its timeout"));
  }
  MutexLock lock(mutex_);
  if (const auto since = collectives_.Since();
      since && now - std::max(*since, last_heard_) > options_.timeout) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job '", options_.job, "': the sidecar at ", options_.sidecar_path,
        " has not answered for ", ToSeconds(options_.timeout), " s; collectives are in flight"));
  }
  for (auto& [index, entry] : buckets_) {
    Bucket& bucket = *entry.second;
    if (bucket.callback.done == nullptr) continue;
    if (bucket.result != nullptr) {
      // A large bucket on a slow network is alive as long as chunks come back.
      const uint32_t seen = bucket.result->WaitReady(0, now);
      if (seen != bucket.chunks_seen) last_progress_ = now;
      bucket.chunks_seen = seen;
    }
    const TimePoint since = std::max(last_heard_, last_progress_);
    const Duration step_timeout = StepTimeout(options_);
    if (now - since <= options_.timeout && now - last_progress_ <= step_timeout) continue;
    const Duration waited = now - since > options_.timeout ? options_.timeout : step_timeout;
    return absl::DeadlineExceededError(
        absl::StrCat("job '", options_.job, "': the sidecar at ", options_.sidecar_path,
                     " has not answered for ", ToSeconds(waited), " s; bucket ",
                     ToString(entry.first), " round ", bucket.round, " is in flight"));
  }
  return absl::OkStatus();
}

bool SidecarSession::SetFailed(const absl::Status& why) {
  {
    MutexLock lock(mutex_);
    if (!status_.ok()) return false;
    status_ = why;
    for (auto& [index, entry] : buckets_) {
      if (entry.second->callback.done == nullptr) continue;
      Callback callback = std::exchange(entry.second->callback, {});
      // The gradient's memory is used until the caller has been told.
      completions_.Add(callback.lane,
                       [done = std::move(callback.done), why,
                        gradient = std::exchange(entry.second->gradient, {})] { done(why); });
    }
    changed_.NotifyAll();
  }
  states_.Fail(why);
  FailCollectives();
  completions_.Overtake();
  return true;
}

void SidecarSession::Fail(const absl::Status& why) {
  if (SetFailed(why)) connection()->Shutdown();
}

void SidecarSession::Close() {
  {
    MutexLock lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  const bool in_order = CanPartInOrder();
  // The reason is set before the sidecar hangs up, which would otherwise become the reason.
  const bool was_ok = SetFailed(
      absl::CancelledError(absl::StrCat("job '", options_.job, "': the session was closed")));
  if (!in_order) {
    // A failure here has no consequence: the sidecar is already gone.
    if (was_ok) connection()->Send(ipc::Leave{}).IgnoreError();
    connection()->Shutdown();
    progress_thread_.Join();
  }
  completions_.Close();
  // The caller's thread keeps its device.
  if (path_ != nullptr) Thread("thw-release", [this] { ReleaseDevice(); }).Join();
  connection()->Shutdown();
  progress_thread_.Join();
  // The process may end at any moment now.
  if (options_.trace != nullptr) options_.trace->Flush(Now() + kTraceTime);
}

}  // namespace thalweg
