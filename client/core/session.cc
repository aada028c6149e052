// A session has two threads besides its callers':
//
//   progress thread    reads the sidecar's messages; runs no code but its own, so it can never be
//   blocked
//                      by what a completion callback waits for
//   completion thread  calls the callbacks, in the order of completion

#include "client/core/session.h"

#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/fork_guard.h"
#include "core/base/mutex.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/connection.h"

namespace thalweg {
namespace {

// How often the progress thread looks at deadlines while nothing comes.
constexpr Duration kLookAround = std::chrono::milliseconds(250);

struct Bucket {
  uint64_t elems = 0;
  ChunkPlan plan;
  DType dtype = DType::kFloat32;
  std::optional<BucketArena> input;
  // Shared with the results handed out, which may outlive the bucket's layout.
  std::shared_ptr<const BucketArena> result;
  uint64_t round = 0;
  Session::Done done;  // set while a round is in flight
  TimePoint submitted;
  uint32_t chunks_seen = 0;  // finished by the sidecar, as of the last look
};

struct Completion {
  Session::Done done;
  absl::StatusOr<ReducedBucket> outcome;
};

Hello MakeHello(const SessionOptions& o) {
  Hello hello;
  hello.ipc_version = kIpcVersion;
  hello.job = o.job;
  hello.rank = o.rank;
  hello.world_size = o.world_size;
  hello.node = o.node;
  hello.num_nodes = o.num_nodes;
  hello.node_name = o.node_name;
  hello.local_rank = o.local_rank;
  hello.local_size = o.local_size;
  hello.codec = o.codec;
  hello.chunk_bytes = o.chunk_bytes;
  hello.timeout_ms = static_cast<uint64_t>(ToNanos(o.timeout) / 1'000'000);
  return hello;
}

class SessionImpl : public Session {
 public:
  SessionImpl(const SessionOptions& options, std::unique_ptr<Connection> connection)
      : options_(options), connection_(std::move(connection)) {
    progress_thread_ = Thread("thw-progress", [this] { ProgressLoop(); });
    completion_thread_ = Thread("thw-complete", [this] { CompletionLoop(); });
  }
  ~SessionImpl() override { Close(); }

  absl::Status RegisterBucket(BucketId id, const BucketLayout& layout) override;
  void Submit(BucketId id, std::span<const std::byte> gradient, Done done) override;
  absl::Status status() const override {
    MutexLock lock(mutex_);
    return status_;
  }
  SessionStats stats() const override {
    MutexLock lock(mutex_);
    return stats_;
  }
  void Close() override;
  // In a forked child: gives up the connection.
  void CloseInChild() { connection_->CloseInChild(); }
  // In a forked child: neither thread exists there.
  void DetachInChild() {
    progress_thread_.Detach();
    completion_thread_.Detach();
  }

 private:
  absl::StatusOr<Bucket*> BeginRound(BucketId id, std::span<const std::byte> gradient, Done& done);
  void Refuse(Done done, absl::Status why);
  void CopyIn(Bucket& bucket, std::span<const std::byte> gradient);
  void ProgressLoop();
  void CompletionLoop();
  absl::Status Handle(Received received);
  absl::Status Finish(const Complete& message);
  absl::Status CheckProgress(TimePoint now);
  // Fails everything in flight and everything that comes.
  void Fail(const absl::Status& why);

  const SessionOptions options_;
  const std::unique_ptr<Connection> connection_;

  mutable Mutex mutex_;
  CondVar changed_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_completions_ ABSL_GUARDED_BY(mutex_) = false;
  // By bucket index. A bucket's memory is used without the lock by the one Submit that fills it.
  std::map<uint32_t, std::pair<BucketId, std::unique_ptr<Bucket>>> buckets_ ABSL_GUARDED_BY(mutex_);
  std::deque<Completion> completions_ ABSL_GUARDED_BY(mutex_);
  SessionStats stats_ ABSL_GUARDED_BY(mutex_);
  TimePoint last_progress_ ABSL_GUARDED_BY(mutex_);

  Thread progress_thread_;
  Thread completion_thread_;
};

absl::Status SessionImpl::RegisterBucket(BucketId id, const BucketLayout& layout) {
  auto bucket = std::make_unique<Bucket>();
  bucket->elems = layout.Elems();
  bucket->dtype = layout.dtype;
  bucket->plan = ChunkPlan::For(bucket->elems, layout.dtype, options_.chunk_bytes);
  THALWEG_ASSIGN_OR_RETURN(
      bucket->input,
      BucketArena::Create("thalweg-gradient", bucket->elems * SizeOf(layout.dtype), true));
  const int fd = bucket->input->fd();
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(status_);
    auto& slot = buckets_[id.index];
    if (slot.second != nullptr && slot.second->done != nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "bucket ", ToString(id), " was registered while a round of it is in flight"));
    }
    slot = {id, std::move(bucket)};
  }
  return connection_->Send(::thalweg::RegisterBucket{id, layout}, fd);
}

void SessionImpl::Submit(BucketId id, std::span<const std::byte> gradient, Done done) {
  auto bucket = BeginRound(id, gradient, done);
  if (!bucket.ok()) {
    Refuse(std::move(done), bucket.status());
    return;
  }
  // Announced first, so that the sidecar works on the first chunks while the last are being copied.
  const absl::Status sent = connection_->Send(::thalweg::Submit{id, (*bucket)->round});
  if (!sent.ok()) {
    Fail(sent);
    return;
  }
  CopyIn(**bucket, gradient);
}

void SessionImpl::Refuse(Done done, absl::Status why) {
  {
    MutexLock lock(mutex_);
    if (!no_more_completions_) {
      completions_.push_back({std::move(done), std::move(why)});
      changed_.NotifyAll();
      return;
    }
  }
  done(std::move(why));  // closed: there is no other thread left to call it
}

absl::StatusOr<Bucket*> SessionImpl::BeginRound(BucketId id, std::span<const std::byte> gradient,
                                                Done& done) {
  MutexLock lock(mutex_);
  THALWEG_RETURN_IF_ERROR(status_);
  const auto found = buckets_.find(id.index);
  if (found == buckets_.end() || found->second.first != id) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", ToString(id), " is not registered"));
  }
  Bucket& bucket = *found->second.second;
  if (gradient.size() != bucket.elems * SizeOf(bucket.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(id), " has ",
                                                   bucket.elems * SizeOf(bucket.dtype),
                                                   " bytes, got ", gradient.size()));
  }
  if (bucket.done != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "bucket ", ToString(id), " was submitted while its round ", bucket.round, " is in flight"));
  }
  ++bucket.round;
  bucket.done = std::move(done);
  bucket.submitted = last_progress_ = Now();
  bucket.chunks_seen = 0;
  bucket.input->ResetReady();
  stats_.raw_bytes += gradient.size();
  return &bucket;
}

void SessionImpl::CopyIn(Bucket& bucket, std::span<const std::byte> gradient) {
  const TimePoint start = Now();
  const size_t size = SizeOf(bucket.dtype);
  for (uint32_t chunk = 0; chunk < bucket.plan.Count(); ++chunk) {
    const size_t begin = bucket.plan.Begin(chunk) * size;
    std::memcpy(bucket.input->payload() + begin, gradient.data() + begin,
                bucket.plan.Elems(chunk) * size);
    bucket.input->PublishReady(chunk + 1);
  }
  MutexLock lock(mutex_);
  stats_.copy_seconds += ToSeconds(Now() - start);
}

void SessionImpl::ProgressLoop() {
  while (true) {
    auto received = connection_->Receive(Now() + kLookAround);
    absl::Status status = received.status();
    if (received.ok()) {
      status = Handle(*std::move(received));
    } else if (absl::IsDeadlineExceeded(status)) {
      status = CheckProgress(Now());
    } else if (absl::IsUnavailable(status)) {
      status = absl::UnavailableError(absl::StrCat("job '", options_.job, "': the sidecar at ",
                                                   options_.sidecar_path,
                                                   " is gone: ", status.message()));
    }
    if (!status.ok()) {
      Fail(status);
      return;
    }
  }
}

absl::Status SessionImpl::Handle(Received received) {
  if (const auto* complete = std::get_if<Complete>(&received.message)) return Finish(*complete);
  if (const auto* fail = std::get_if<::thalweg::Fail>(&received.message)) {
    return absl::Status(fail->code, fail->message);
  }
  if (const auto* ready = std::get_if<BucketReady>(&received.message)) {
    MutexLock lock(mutex_);
    const auto found = buckets_.find(ready->id.index);
    // The answer to a layout that has been replaced meanwhile.
    if (found == buckets_.end() || found->second.first != ready->id) return absl::OkStatus();
    Bucket& bucket = *found->second.second;
    THALWEG_ASSIGN_OR_RETURN(
        BucketArena arena,
        BucketArena::Open(std::move(received.fd), bucket.elems * SizeOf(bucket.dtype)));
    bucket.result = std::make_shared<const BucketArena>(std::move(arena));
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the sidecar sent an unexpected ", Name(received.message)));
}

absl::Status SessionImpl::Finish(const Complete& m) {
  MutexLock lock(mutex_);
  const auto found = buckets_.find(m.id.index);
  if (found == buckets_.end() || found->second.first != m.id ||
      found->second.second->round != m.round || found->second.second->done == nullptr ||
      found->second.second->result == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("the sidecar completed round ", m.round,
                                                   " of bucket ", ToString(m.id),
                                                   ", which is not in flight"));
  }
  Bucket& bucket = *found->second.second;
  const TimePoint now = Now();
  last_progress_ = now;
  ++stats_.rounds;
  stats_.wire_bytes_sent += m.wire_bytes_sent;
  stats_.wire_bytes_received += m.wire_bytes_received;
  stats_.nonfinite_elems += m.nonfinite_elems;
  stats_.reduce_seconds += static_cast<double>(m.reduce_ns) * 1e-9;
  stats_.wait_seconds += static_cast<double>(m.wait_ns) * 1e-9;
  stats_.wire_seconds += static_cast<double>(m.wire_ns) * 1e-9;
  stats_.total_seconds += ToSeconds(now - bucket.submitted);
  const BucketArena& arena = *bucket.result;
  completions_.push_back({std::exchange(bucket.done, nullptr),
                          ReducedBucket{{arena.payload(), arena.payload_bytes()}, bucket.result}});
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status SessionImpl::CheckProgress(TimePoint now) {
  MutexLock lock(mutex_);
  for (auto& [index, entry] : buckets_) {
    Bucket& bucket = *entry.second;
    if (bucket.done == nullptr) continue;
    if (bucket.result != nullptr) {
      // A big bucket on a slow network is alive as long as chunks come back.
      const uint32_t seen = bucket.result->WaitReady(0, now);
      if (seen != bucket.chunks_seen) last_progress_ = now;
      bucket.chunks_seen = seen;
    }
    if (now - last_progress_ <= options_.timeout) continue;
    return absl::DeadlineExceededError(
        absl::StrCat("job '", options_.job, "': the sidecar at ", options_.sidecar_path,
                     " has not answered for ", ToSeconds(options_.timeout), " s; bucket ",
                     ToString(entry.first), " round ", bucket.round, " is in flight"));
  }
  return absl::OkStatus();
}

void SessionImpl::Fail(const absl::Status& why) {
  {
    MutexLock lock(mutex_);
    if (!status_.ok()) return;
    status_ = why;
    for (auto& [index, entry] : buckets_) {
      if (entry.second->done == nullptr) continue;
      completions_.push_back({std::exchange(entry.second->done, nullptr), why});
    }
    changed_.NotifyAll();
  }
  connection_->Shutdown();
}

void SessionImpl::CompletionLoop() {
  while (true) {
    Completion next;
    {
      MutexLock lock(mutex_);
      changed_.WaitUntil(mutex_, kUntilStopped, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !completions_.empty() || no_more_completions_;
      });
      if (completions_.empty()) return;
      next = std::move(completions_.front());
      completions_.pop_front();
    }
    next.done(std::move(next.outcome));
  }
}

void SessionImpl::Close() {
  {
    MutexLock lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  // Nobody to tell when this fails: the sidecar is gone already.
  if (status().ok()) connection_->Send(Leave{}).IgnoreError();
  Fail(absl::CancelledError(absl::StrCat("job '", options_.job, "': the session was closed")));
  progress_thread_.Join();
  {
    MutexLock lock(mutex_);
    no_more_completions_ = true;
    changed_.NotifyAll();
  }
  completion_thread_.Join();
}

// What the user holds. In a forked child it lets go of the session without touching its threads,
// locks and connection, which belong to the parent.
class ForkSafeSession : public Session {
 public:
  explicit ForkSafeSession(std::unique_ptr<SessionImpl> impl)
      : impl_(std::move(impl)), guard_([raw = impl_.get()] { raw->CloseInChild(); }) {}
  ~ForkSafeSession() override {
    if (guard_.InChild()) {
      impl_->DetachInChild();
      impl_.release();  // NOLINT: leaked on purpose, see above
    }
  }
  absl::Status RegisterBucket(BucketId id, const BucketLayout& layout) override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    return impl_->RegisterBucket(id, layout);
  }
  void Submit(BucketId id, std::span<const std::byte> gradient, Done done) override {
    const absl::Status status = CheckProcess();
    if (status.ok()) return impl_->Submit(id, gradient, std::move(done));
    done(status);
  }
  absl::Status status() const override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    return impl_->status();
  }
  SessionStats stats() const override {
    return CheckProcess().ok() ? impl_->stats() : SessionStats{};
  }
  void Close() override {
    if (!guard_.InChild()) impl_->Close();
  }

 private:
  absl::Status CheckProcess() const {
    if (!guard_.InChild()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "this session belongs to the parent process; a forked child must not use it");
  }

  std::unique_ptr<SessionImpl> impl_;
  const ForkGuard guard_;  // after impl_, so that it is gone first
};

absl::Status AwaitWelcome(Connection& connection, const SessionOptions& options,
                          TimePoint deadline) {
  auto received = connection.Receive(deadline);
  if (absl::IsDeadlineExceeded(received.status())) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job '", options.job, "': the sidecar at ", options.sidecar_path, " did not admit rank ",
        options.rank, " within ", ToSeconds(options.timeout), " s"));
  }
  if (!received.ok()) {
    return absl::Status(received.status().code(),
                        absl::StrCat("job '", options.job, "': the sidecar at ",
                                     options.sidecar_path, ": ", received.status().message()));
  }
  if (const auto* fail = std::get_if<Fail>(&received->message)) {
    return absl::Status(fail->code, fail->message);
  }
  if (!std::holds_alternative<Welcome>(received->message)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the sidecar answered with ", Name(received->message)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(const SessionOptions& options) {
  const TimePoint deadline = Now() + options.timeout;
  THALWEG_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                           Connection::Connect(options.sidecar_path, deadline));
  THALWEG_RETURN_IF_ERROR(connection->Send(MakeHello(options)));
  THALWEG_RETURN_IF_ERROR(AwaitWelcome(*connection, options, deadline));
  return std::make_unique<ForkSafeSession>(
      std::make_unique<SessionImpl>(options, std::move(connection)));
}

}  // namespace thalweg
