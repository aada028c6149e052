#include "client/core/sidecar_session.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// The progress thread checks deadlines at this interval while no message arrives.
constexpr Duration kLookAtSidecar = std::chrono::milliseconds(250);
// Writing the rest of a trace may take this long.
constexpr Duration kTraceTime = std::chrono::seconds(2);

}  // namespace

void SidecarSession::operator delete(SidecarSession* session, std::destroying_delete_t) {
  if (session->fork_guard_.InChild()) {
    session->progress_thread_.Detach();
    session->completions_.DetachInChild();
    return;  // leaked on purpose: locks may be held by threads that are not here
  }
  session->~SidecarSession();
  ::operator delete(session);
}

absl::Status SidecarSession::CheckProcess() const {
  if (!fork_guard_.InChild()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this session belongs to the parent process; a forked child must not use it");
}

SessionStats SidecarSession::stats() const {
  if (fork_guard_.InChild()) return {};
  MutexLock lock(mutex_);
  SessionStats stats = stats_;
  stats.path = path();
  stats.num_shards = welcome_.num_shards;
  stats.placement = welcome_.placement;
  return stats;
}

absl::Status SidecarSession::Tell(const ipc::Message& message, int fd) {
  std::shared_ptr<Connection> last;
  absl::Status sent;
  while (true) {
    std::shared_ptr<Connection> connection;
    {
      MutexLock lock(mutex_);
      // A connection that has just closed: the progress thread notices too, and fails or leaves for
      // the next process, which is told then.
      changed_.WaitUntil(mutex_, Now() + options_.timeout + options_.reconnect,
                         [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                           return !status_.ok() || (!is_away_ && connection_ != last);
                         });
      THALWEG_RETURN_IF_ERROR(status_);
      connection = connection_;
    }
    if (connection == last) return sent;
    sent = connection->Send(message, fd);
    if (!absl::IsUnavailable(sent)) return sent;
    last = std::move(connection);
  }
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

template <typename Call>
void SidecarSession::Begin(Call call, const Collectives::Done& done) {
  absl::Status begun = status();
  if (!begun.ok()) return done(begun);
  if (call.is_ordered) begun = Explain(completions_.AwaitTurn(Now() + call.timeout));
  if (begun.ok()) {
    begun = Explain(collectives_.Start(std::move(call), completions_.LaneHere(), done));
  }
  if (begun.ok()) return FailCollectives();  // if it has failed in between
  // The others wait for this call: whatever the caller began next would be taken for it.
  FailForAll(begun);
  done(begun);
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
        if (status.ok() || absl::IsDeadlineExceeded(status)) continue;
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
      if (status.ok()) {
        // A sidecar that lives says what is late.
        status = CheckProgress(Now());
        if (!status.ok()) FailForAll(status);
      }
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
  THALWEG_RETURN_IF_ERROR(CheckProcess());
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
  {
    MutexLock lock(mutex_);
    has_loaded_ = true;
    for (auto& [index, entry] : buckets_) entry.second->loaded_at = entry.second->round;
  }
  return states_.SetCodecState(state);
}

void SidecarSession::NotePrecision(double loss_scale, uint64_t skipped_steps) {
  if (fork_guard_.InChild()) return;
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
  if (const auto* lost = std::get_if<ipc::Lost>(&received.message)) {
    MutexLock lock(mutex_);
    stats_.lost_nodes.push_back(absl::StrCat(lost->node, ": ", lost->why));
    return absl::OkStatus();
  }
  if (const auto* memory = std::get_if<ipc::CodecMemory>(&received.message)) {
    OnCodecMemory(*memory, std::move(received.fd));
    return absl::OkStatus();
  }
  if (const auto* ready = std::get_if<ipc::BucketReady>(&received.message)) {
    const absl::Status status = OnReady(*ready, std::move(received.fd));
    if (!status.ok()) FailForAll(status);  // the sidecar does not know it
    return status;
  }
  if (const auto* state = std::get_if<ipc::CodecState>(&received.message)) {
    return states_.OnCodecState(*state, std::move(received.fd));
  }
  if (const auto* weights = std::get_if<ipc::Weights>(&received.message)) {
    return states_.OnWeights(*weights, std::move(received.fd));
  }
  if (const auto* snapshots = std::get_if<ipc::Snapshots>(&received.message)) {
    return states_.OnSnapshots(*snapshots);
  }
  if (const auto* taken = std::get_if<ipc::WeightsTaken>(&received.message)) {
    return states_.OnWeightsTaken(*taken);
  }
  return HandleCollective(std::move(received));
}

absl::Status SidecarSession::HandleCollective(Received received) {
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

absl::Status SidecarSession::ShowLife(TimePoint now) {
  if (now - last_life_ < options_.timeout / kSignsOfLife) return absl::OkStatus();
  last_life_ = now;
  // A connection that has closed is noticed by who reads from it.
  collectives_.GiveUpIdle(now).IgnoreError();
  // A callback that keeps others waiting may wait for what one of them is to be told.
  completions_.StandInForLate(now, options_.timeout / kSignsOfLife);
  const absl::Status sent = connection()->Send(ipc::Alive{});
  // What was received before the connection closed tells why.
  return absl::IsUnavailable(sent) ? absl::OkStatus() : sent;
}

absl::Status SidecarSession::CheckProgress(TimePoint now) {
  MutexLock lock(mutex_);
  if (const auto since = collectives_.Since();
      since && now - std::max(*since, last_heard_) > options_.timeout) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job '", options_.job, "': the sidecar at ", options_.sidecar_path,
        " has not answered for ", ToSeconds(options_.timeout), " s; collectives are in flight"));
  }
  for (auto& [index, entry] : buckets_) {
    SessionBucket& bucket = *entry.second;
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
      SessionCallback callback = std::exchange(entry.second->callback, {});
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

void SidecarSession::Abort(const std::string& why) {
  if (fork_guard_.InChild()) return;
  const std::string job = absl::StrCat("job '", options_.job, "'");
  if (!SetFailed(absl::CancelledError(absl::StrCat(job, ": this worker has aborted it")))) return;
  // Without the message the others would hear of a worker that is gone.
  const ipc::Fail fail{absl::StatusCode::kAborted, why};
  connection()->Send(fail).IgnoreError();
  connection()->Shutdown();
}

void SidecarSession::Close() {
  if (fork_guard_.InChild()) return;
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
  collectives_.Release();
  // The process may end at any moment now.
  if (options_.trace != nullptr) options_.trace->Flush(Now() + kTraceTime);
}

}  // namespace thalweg
