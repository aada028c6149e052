// The session itself, without regard to forks.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "client/core/session.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/connection.h"

namespace thalweg {

// Two threads besides its callers':
//
//   progress thread    reads the sidecar's messages; runs no code but its own, so it can never be
//                      blocked by what a completion callback waits for
//   completion thread  calls the callbacks, in the order of completion
class SidecarSession : public Session {
 public:
  SidecarSession(const SessionOptions& options, Welcome welcome,
                 std::unique_ptr<Connection> connection)
      : options_(options), welcome_(std::move(welcome)), connection_(std::move(connection)) {
    progress_thread_ = Thread("thw-progress", [this] { ProgressLoop(); });
    completion_thread_ = Thread("thw-complete", [this] { CompletionLoop(); });
  }
  ~SidecarSession() override { Close(); }

  absl::Status RegisterBucket(BucketId id, const BucketLayout& layout) override;
  void Submit(BucketId id, std::span<const std::byte> gradient, Done done) override {
    Start(id, gradient, {std::move(done), CallOn::kCompletionThread});
  }
  absl::StatusOr<ReducedBucket> Reduce(BucketId id, std::span<const std::byte> gradient) override;
  absl::Status SaveCodecState(const std::function<void(std::span<const std::byte>)>& use) override;
  absl::Status LoadCodecState(std::span<const std::byte> state) override;
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
  // Foreign code runs on the completion thread; our own, which only wakes a waiter, may run on the
  // progress thread.
  enum class CallOn { kCompletionThread, kProgressThread };
  struct Callback {
    Done done;
    CallOn thread = CallOn::kCompletionThread;
  };
  struct Bucket {
    uint64_t elems = 0;
    ChunkPlan plan;
    DType dtype = DType::kFloat32;
    DType share = DType::kFloat32;  // of what lies in `input`
    std::optional<BucketArena> input;
    // Shared with the results handed out, which may outlive the bucket's layout.
    std::shared_ptr<const BucketArena> result;
    uint64_t round = 0;
    Callback callback;  // set while a round is in flight
    TimePoint submitted;
    uint32_t chunks_seen = 0;  // finished by the sidecar, as of the last look
  };

  struct Completion {
    Session::Done done;
    absl::StatusOr<ReducedBucket> outcome;
  };

  void Start(BucketId id, std::span<const std::byte> gradient, Callback callback);
  absl::StatusOr<Bucket*> BeginRound(BucketId id, std::span<const std::byte> gradient,
                                     Callback& callback);
  void Refuse(Done done, absl::Status why);
  absl::Status CheckIdleLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CopyIn(Bucket& bucket, std::span<const std::byte> gradient);
  void ProgressLoop();
  void CompletionLoop();
  absl::Status Handle(Received received);
  absl::Status Finish(const Complete& message);
  absl::Status CheckProgress(TimePoint now);
  // Fails everything in flight and everything that comes.
  void Fail(const absl::Status& why);

  const SessionOptions options_;
  const Welcome welcome_;
  const std::unique_ptr<Connection> connection_;

  mutable Mutex mutex_;
  CondVar changed_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_completions_ ABSL_GUARDED_BY(mutex_) = false;
  // By bucket index. A bucket's memory is used without the lock by the one Submit that fills it.
  std::map<uint32_t, std::pair<BucketId, std::unique_ptr<Bucket>>> buckets_ ABSL_GUARDED_BY(mutex_);
  std::deque<Completion> completions_ ABSL_GUARDED_BY(mutex_);
  std::optional<BucketArena> codec_state_ ABSL_GUARDED_BY(mutex_);  // the sidecar's answer
  SessionStats stats_ ABSL_GUARDED_BY(mutex_);
  TimePoint last_progress_ ABSL_GUARDED_BY(mutex_);

  Thread progress_thread_;
  Thread completion_thread_;
};

}  // namespace thalweg
