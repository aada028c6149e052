#include "core/device/nccl_group.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/env.h"
#include "core/base/mutex.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"

namespace thalweg {
namespace {

int TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kNcclFloat32;
    case DType::kFloat16:
      return kNcclFloat16;
    case DType::kBFloat16:
      return kNcclBFloat16;
    case DType::kFloat64:
      return kNcclFloat64;
    default:
      return -1;  // gradients are floats; NCCL refuses it
  }
}

absl::Status ErrorOf(const NcclApi& api, const std::string& what, int result) {
  std::string message = absl::StrCat("NCCL: ", what, ": ", api.get_error_string(result));
  const char* const detail = api.get_last_error(nullptr);
  if (detail != nullptr && *detail != '\0') absl::StrAppend(&message, " (", detail, ")");
  if (result == kNcclInProgress) {
    absl::StrAppend(&message,
                    "; calls must block until they have queued: unset NCCL_COMM_BLOCKING");
  }
  return absl::InternalError(message);
}

}  // namespace

struct NcclGroup::State {
  State(const NcclApi& nccl, std::vector<std::shared_ptr<DeviceRuntime>> members, Duration how_long)
      : api(nccl), gpus(std::move(members)), patience(how_long), comms(gpus.size()) {}

  // Makes the thread do `work`; the previous work must have ended.
  void Begin(const char* name, std::function<void()> work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    done = false;
    thread = Thread(name, [this, work = std::move(work)] {
      work();
      MutexLock lock(mutex);
      done = true;
      changed.NotifyAll();
    });
  }
  bool WaitUntilDone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return changed.WaitUntil(mutex, Now() + patience,
                             [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return done; });
  }
  bool WaitForCaller() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return changed.WaitUntil(mutex, Now() + patience,
                             [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return !in_call; });
  }

  void Connect();
  void TakeApart(int (*how)(NcclComm));
  void FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (failure.ok()) failure = why;
  }
  void AbortLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (failure.ok() || std::exchange(is_aborted, true)) return;
    Begin("nccl-abort", [this] { TakeApart(api.comm_abort); });
  }
  static void LeaveBehind(std::unique_ptr<State> state);

  const NcclApi api;
  const std::vector<std::shared_ptr<DeviceRuntime>> gpus;
  const Duration patience;
  // Connect writes this; NCCL allows one thread to check for errors while another one calls.
  std::vector<NcclComm> comms;
  Mutex mutex;
  CondVar changed;
  bool in_call ABSL_GUARDED_BY(mutex) = false;
  bool done ABSL_GUARDED_BY(mutex) = true;
  absl::Status failure ABSL_GUARDED_BY(mutex);
  bool is_aborted ABSL_GUARDED_BY(mutex) = false;
  Thread thread;  // declared last: joined while the rest exists
};

void NcclGroup::State::Connect() {
  std::vector<int> numbers;
  for (const auto& gpu : gpus) numbers.push_back(gpu->number());
  absl::Status status = gpus.front()->BindThread();
  if (status.ok()) {
    const int count = static_cast<int>(comms.size());
    const int result = api.comm_init_all(comms.data(), count, numbers.data());
    if (result != kNcclSuccess) status = ErrorOf(api, "ncclCommInitAll", result);
  }
  MutexLock lock(mutex);
  failure = status;
}

// The members are taken apart in one group call: a thread that did one after the other could wait
// for members that it has not reached yet.
void NcclGroup::State::TakeApart(int (*how)(NcclComm)) {
  {
    MutexLock lock(mutex);
    if (!WaitForCaller()) return;  // its members are in use, perhaps for ever
  }
  // One of the group's devices is bound, so that NCCL does not start to use another; a GPU may be
  // lost.
  for (const auto& gpu : gpus) {
    if (gpu->BindThread().ok()) break;
  }
  api.group_start();
  for (const NcclComm comm : comms) how(comm);
  api.group_end();
}

void NcclGroup::State::LeaveBehind(std::unique_ptr<State> state) {
  state->thread.Detach();  // it may never end
  static Mutex left_mutex;
  static auto* const left = new std::vector<std::unique_ptr<State>>();
  MutexLock lock(left_mutex);
  left->push_back(std::move(state));
}

absl::StatusOr<std::shared_ptr<DeviceGroup>> NcclGroup::Create(
    const NcclApi& api, std::vector<std::shared_ptr<DeviceRuntime>> gpus, Duration patience) {
  auto state = std::make_unique<State>(api, std::move(gpus), patience);
  bool done = false;
  absl::Status status;
  {
    MutexLock lock(state->mutex);
    state->Begin("nccl-connect", [s = state.get()] { s->Connect(); });
    done = state->WaitUntilDone();
    status = state->failure;
  }
  if (!done) {
    status = absl::DeadlineExceededError(absl::StrCat("NCCL did not connect ", state->gpus.size(),
                                                      " GPUs within ", ToSeconds(patience),
                                                      " s; NCCL_DEBUG=INFO says what it does"));
    State::LeaveBehind(std::move(state));
  }
  THALWEG_RETURN_IF_ERROR(status);
  return std::shared_ptr<DeviceGroup>(new NcclGroup(std::move(state)));
}

NcclGroup::NcclGroup(std::unique_ptr<State> state) : state_(std::move(state)) {}

NcclGroup::~NcclGroup() {
  bool done = false;
  {
    MutexLock lock(state_->mutex);
    if (state_->failure.ok()) {
      state_->Begin("nccl-destroy", [s = state_.get()] { s->TakeApart(s->api.comm_destroy); });
    }
    state_->AbortLocked();
    done = state_->WaitUntilDone();
  }
  if (!done) State::LeaveBehind(std::move(state_));
}

absl::Status NcclGroup::Queue(
    const char* call, std::span<const Member> members, size_t root,
    const std::function<int(const Member&, NcclComm, bool is_root)>& one) {
  State& state = *state_;
  if (members.size() != state.comms.size() || root >= members.size()) {
    return absl::InvalidArgumentError(absl::StrCat(call, ": ", members.size(), " members, root ",
                                                   root, ", in a group of ", state.comms.size()));
  }
  {
    MutexLock lock(state.mutex);
    if (!state.WaitForCaller()) {
      state.FailLocked(absl::DeadlineExceededError(
          absl::StrCat("NCCL: a call has not returned for ", ToSeconds(state.patience), " s")));
    }
    THALWEG_RETURN_IF_ERROR(state.failure);
    state.in_call = true;
  }
  int result = state.api.group_start();
  const bool started = result == kNcclSuccess;
  for (size_t i = 0; i < members.size() && result == kNcclSuccess; ++i) {
    result = one(members[i], state.comms[i], i == root);
  }
  if (started) {
    // also after an error: otherwise this thread would stay in the group
    const int ended = state.api.group_end();
    if (result == kNcclSuccess) result = ended;
  }
  MutexLock lock(state.mutex);
  state.in_call = false;
  state.changed.NotifyAll();
  if (result != kNcclSuccess) state.FailLocked(ErrorOf(state.api, call, result));
  return state.failure;
}

absl::Status NcclGroup::Reduce(std::span<const Member> members, size_t root, DType dtype,
                               uint64_t elems) {
  return Queue("ncclReduce", members, root, [&](const Member& member, NcclComm comm, bool is_root) {
    return state_->api.reduce(member.memory, is_root ? member.memory : nullptr, elems,
                              TypeOf(dtype), kNcclSum, static_cast<int>(root), comm, member.stream);
  });
}

absl::Status NcclGroup::Broadcast(std::span<const Member> members, size_t root, uint64_t bytes) {
  return Queue("ncclBroadcast", members, root,
               [&](const Member& member, NcclComm comm, bool /*is_root*/) {
                 return state_->api.broadcast(member.memory, member.memory, bytes, kNcclUint8,
                                              static_cast<int>(root), comm, member.stream);
               });
}

absl::Status NcclGroup::Check() {
  State& state = *state_;
  MutexLock lock(state.mutex);
  for (size_t i = 0; i < state.comms.size() && state.failure.ok(); ++i) {
    int error = kNcclSuccess;
    const int result = state.api.comm_get_async_error(state.comms[i], &error);
    if (result != kNcclSuccess) error = result;
    if (error == kNcclSuccess) continue;
    state.FailLocked(ErrorOf(state.api, absl::StrCat("GPU ", state.gpus[i]->number()), error));
  }
  return state.failure;
}

void NcclGroup::Fail(const absl::Status& why) {
  MutexLock lock(state_->mutex);
  state_->FailLocked(why);
}

void NcclGroup::Abort() {
  MutexLock lock(state_->mutex);
  state_->AbortLocked();
}

absl::StatusOr<std::shared_ptr<DeviceGroup>> OpenNcclGroup(
    const std::vector<std::shared_ptr<DeviceRuntime>>& gpus, Duration patience) {
  THALWEG_ASSIGN_OR_RETURN(const NcclApi api, LoadNccl(GetEnv("THALWEG_NCCL_LIBRARY")));
  return NcclGroup::Create(api, gpus, patience);
}

}  // namespace thalweg
