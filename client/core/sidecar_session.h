// SidecarSession implements Session.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/collectives.h"
#include "client/core/completions.h"
#include "client/core/device_path.h"
#include "client/core/fork_guard.h"
#include "client/core/session.h"
#include "client/core/session_bucket.h"
#include "client/core/state_calls.h"
#include "core/base/mutex.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"
#include "core/ipc/bucket_arena.h"
#include "core/ipc/connection.h"

namespace thalweg {

// A session has these threads besides its callers':
//
//   progress thread     reads the sidecar's messages; runs only the session's own code, so what a
//                       completion callback waits for can never block it
//   completion threads  call the callbacks: see Completions
//
// When the sidecar's process ends without a word, the progress thread waits for the next one and
// lets it take up the job (sidecar_session_return.cc). Until it has, the session is away: what
// callers submit is only noted.
//
// In a forked child it touches neither threads nor locks, which belong to the parent.
class SidecarSession : public Session {
 public:
  // `hello` is what has been answered with `welcome`. `path` is null for gradients in host memory.
  SidecarSession(const SessionOptions& options, ipc::Hello hello, ipc::Welcome welcome,
                 std::shared_ptr<Connection> connection, std::unique_ptr<DevicePath> path)
      : options_(options),
        hello_(std::move(hello)),
        welcome_(std::move(welcome)),
        in_child_(connection.get()),
        connection_(std::move(connection)),
        collectives_([this](const ipc::Message& message, int fd) {
          return this->connection()->Send(message, fd);
        }),
        states_(absl::StrCat("job '", options.job, "': the sidecar at ", options.sidecar_path),
                options.timeout,
                [this](const ipc::Message& message, int fd) { return Tell(message, fd); }),
        path_(std::move(path)),
        trace_(options.trace.get(), "worker", options.job,
               {{"rank", options.rank},
                {"node", options.node},
                {"world_size", options.world_size},
                {"num_nodes", options.num_nodes}}),
        fork_guard_([this] { in_child_.load()->CloseInChild(); }) {
    progress_thread_ = Thread("thw-progress", [this] { ProgressLoop(); });
  }
  ~SidecarSession() override { Close(); }
  // Leaves a forked child's session as it is, but for the threads, which do not exist there.
  static void operator delete(SidecarSession* session, std::destroying_delete_t);

  absl::Status RegisterBucket(BucketId id, const BucketLayout& layout) override {
    return Announce(id, layout, std::nullopt);
  }
  absl::Status RegisterServedBucket(BucketId id, const BucketLayout& layout,
                                    const UpdateRule& update) override {
    return Announce(id, layout, update);
  }
  absl::Status SetSettings(uint64_t number, const UpdateStep& step) override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    return Tell(ipc::SetSettings{number, step});
  }
  absl::StatusOr<WeightsSlice> ReadWeights(BucketId id, uint32_t slice) override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    return states_.GetWeights(id, slice);
  }
  absl::Status WriteWeights(BucketId id, uint32_t slice, std::span<const float> values,
                            uint64_t steps) override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    return states_.SetWeights(id, slice, values, steps);
  }
  absl::StatusOr<SnapshotReport> Snapshots(SnapshotAction action, SnapshotId id) override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    return states_.Snapshots({action, id});
  }
  void Submit(BucketId id, std::span<const std::byte> gradient, Notes notes, Done done) override {
    Start(id, gradient, std::move(notes),
          {std::move(done), SessionCallback::On::kCompletionThread});
  }
  void Pull(BucketId id, uint64_t settings, Done done) override {
    StartWithoutGradient(id, settings, UpdateRound::kPull, std::move(done));
  }
  void Measure(BucketId id, uint64_t settings, Done done) override {
    StartWithoutGradient(id, settings, UpdateRound::kMeasure, std::move(done));
  }
  void SubmitFromDevice(BucketId id, DeviceGradient gradient, Notes notes, Done done) override;
  absl::StatusOr<ReducedBucket> Reduce(BucketId id, std::span<const std::byte> gradient) override;
  absl::Status SaveCodecState(const std::function<void(std::span<const std::byte>)>& use) override;
  absl::Status LoadCodecState(std::span<const std::byte> state) override;
  void NotePrecision(double loss_scale, uint64_t skipped_steps) override;
  absl::Status MakeGroup(const WorkerGroup& group) override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    return Explain(collectives_.MakeGroup(group));
  }
  void Collect(CollectiveCall call, std::function<void(absl::Status)> done) override;
  void Exchange(PeerCall call, std::function<void(absl::Status)> done) override;
  const std::string& job() const override { return options_.job; }
  std::shared_ptr<DeviceRuntime> device() const override { return options_.device; }
  absl::Status status() const override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    MutexLock lock(mutex_);
    return status_;
  }
  SessionStats stats() const override;
  void Close() override;
  void Abort(const std::string& why) override;
  int CompletionThreadHere() const override { return completions_.LaneHere(); }
  absl::Status BeforeWait(int completion_thread) override {
    THALWEG_RETURN_IF_ERROR(CheckProcess());
    completions_.StandInFor(completion_thread);
    return absl::OkStatus();
  }
  bool IsCompletionThread() const override { return completions_.IsHere(); }

 private:
  // Returns an error in a forked child.
  absl::Status CheckProcess() const;
  // Names a round in flight, and through which connection to announce it; null: the session is
  // away, and will do so when it has returned.
  struct Begun {
    SessionBucket* bucket = nullptr;
    std::shared_ptr<Connection> connection;
  };

  GradientPath path() const { return path_ == nullptr ? GradientPath::kCpu : path_->path(); }
  bool UsesArenas() const { return path_ == nullptr || path_->UsesArenas(); }
  absl::Status Announce(BucketId id, const BucketLayout& layout,
                        const std::optional<UpdateRule>& update);
  void Start(BucketId id, std::span<const std::byte> gradient, Notes notes,
             SessionCallback callback);
  std::shared_ptr<Connection> connection() const {
    MutexLock lock(mutex_);
    return connection_;
  }
  // Sends, when the session is not away; not for the progress thread. See Explain.
  absl::Status Tell(const ipc::Message& message, int fd = -1);
  // Sends what is noted too: if the sidecar's process ends, the next one will be told. A null
  // `connection` means that it will be anyway.
  absl::Status TellNoted(const std::shared_ptr<Connection>& connection, const ipc::Message& message,
                         int fd = -1);
  // Returns what became of sending; for a closed connection, why the progress thread, which reads
  // the sidecar's last words, has failed or is about to fail the session.
  absl::Status Explain(absl::Status sent);
  // `gradient` is null for a gradient in host memory; `bytes` is its size in either case, and
  // absent where there is none. `submit` needs no round.
  absl::StatusOr<Begun> BeginRound(ipc::Submit submit, std::optional<size_t> bytes,
                                   DeviceGradient* gradient, SessionCallback& callback);
  void Refuse(Done done, absl::Status why);
  void StartWithoutGradient(BucketId id, uint64_t settings, UpdateRound kind, Done done);
  template <typename Call>
  void Begin(Call call, const Collectives::Done& done);
  // Fails all collectives if the session has failed.
  void FailCollectives();
  absl::Status CheckIdle() const;
  void CopyIn(BucketId id, SessionBucket& bucket, std::span<const std::byte> gradient);
  // Traces that the gradient has been copied since `start`; called before anyone is told.
  void TraceCopyIn(BucketId id, SessionBucket& bucket, TimePoint start);
  TraceSubject Describe(BucketId id, const SessionBucket& bucket) const;
  void ProgressLoop();
  absl::Status Handle(Received received);
  absl::Status HandleCollective(Received received);  // what concerns collectives
  absl::Status OnReady(const ipc::BucketReady& ready, UniqueFd fd);
  void OnPlaced(ipc::Placed message);
  void OnCodecMemory(const ipc::CodecMemory& message, UniqueFd fd);
  absl::Status Finish(const ipc::Complete& message);
  // Tells the sidecar, when it is time, that this worker is alive, whatever its own code does.
  absl::Status ShowLife(TimePoint now);
  absl::Status CheckProgress(TimePoint now);
  // The sidecar is gone, as `lost` says. Returns OK when a new process has taken up the job. These
  // are the progress thread's, in sidecar_session_return.cc.
  absl::Status Return(const absl::Status& lost);
  // Begins the absence, or returns why the session cannot be away.
  absl::Status LeaveForNow(const absl::Status& lost);
  absl::Status CheckMayReturnLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TryToReturn(TimePoint deadline);
  absl::Status BringAlong(Connection& connection);
  absl::Status AwaitWelcome(Connection& connection, TimePoint deadline);
  // Tells the new process what has been noted; the session is away no longer.
  absl::Status GoOn(std::shared_ptr<Connection> connection);
  // Fails everything in flight and everything later. Returns false if the session had already
  // failed.
  bool SetFailed(const absl::Status& why);
  // Calls SetFailed and closes the connection.
  void Fail(const absl::Status& why);
  // Calls SetFailed for a reason that the sidecar does not know yet, and tells the sidecar.
  void FailForAll(const absl::Status& why);
  absl::StatusOr<ReducedBucket> Land(const SessionLanding& landing);
  // When sidecar and worker have opened each other's memory, neither may free its own before the
  // other has closed it: the worker first closes the result, then leaves, and the sidecar closes
  // what it has opened before it hangs up. After a failure, or with rounds in flight, the device's
  // progress is unknown: memory is then kept until the process ends.
  bool CanPartInOrder();
  void ReleaseDevice();
  bool Part(const std::vector<std::shared_ptr<DevicePath::Lane>>& lanes);

  const SessionOptions options_;
  const ipc::Hello hello_;
  const ipc::Welcome welcome_;
  std::atomic<Connection*> in_child_;  // that of the moment, for a forked child
  mutable Mutex mutex_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mutex_);
  Collectives collectives_;
  StateCalls states_;
  const std::unique_ptr<DevicePath> path_;  // null without a device
  const JobTrace trace_;

  CondVar changed_;
  bool is_away_ ABSL_GUARDED_BY(mutex_) = false;
  // A codec's state, with which some bucket may still be without a round.
  bool has_loaded_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool parts_in_order_ ABSL_GUARDED_BY(mutex_) = false;
  bool sidecar_hung_up_ ABSL_GUARDED_BY(mutex_) = false;
  // Buckets are stored by index. The one Submit that fills a bucket uses its memory without the
  // lock.
  std::map<uint32_t, std::pair<BucketId, std::unique_ptr<SessionBucket>>> buckets_
      ABSL_GUARDED_BY(mutex_);
  SessionStats stats_ ABSL_GUARDED_BY(mutex_);
  TimePoint last_progress_ ABSL_GUARDED_BY(mutex_);  // of the buckets in flight
  TimePoint last_heard_ ABSL_GUARDED_BY(mutex_);  // from the sidecar, which is silent without any
  TimePoint last_life_;                           // of the progress thread

  Mutex landing_;               // held while a result is brought to the device
  const ForkGuard fork_guard_;  // closes a child's copy of the connection
  Completions completions_;
  Thread progress_thread_;
};

}  // namespace thalweg
