#include "client/core/state_calls.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

absl::StatusOr<StateCalls::Answer> StateCalls::Ask(const ipc::Message& question, int fd,
                                                   const Topic& topic, const std::string& what) {
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(failure_);
    answer_.reset();
    asked_ = topic;
    last_heard_ = Now();
  }
  const absl::Status sent = tell_(question, fd);
  MutexLock lock(mutex_);
  while (sent.ok() && failure_.ok() && !answer_ && Now() - last_heard_ <= timeout_) {
    changed_.WaitUntil(mutex_, last_heard_ + timeout_, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return answer_.has_value() || !failure_.ok();
    });
  }
  asked_.reset();
  THALWEG_RETURN_IF_ERROR(failure_);
  THALWEG_RETURN_IF_ERROR(sent);
  if (answer_) return *std::exchange(answer_, std::nullopt);
  return absl::DeadlineExceededError(
      absl::StrCat(who_, " did not ", what, " within ", ToSeconds(timeout_), " s"));
}

void StateCalls::Take(const Topic& topic, Answer answer) {
  MutexLock lock(mutex_);
  if (asked_ != topic) return;
  answer_ = std::move(answer);
  changed_.NotifyAll();
}

absl::Status StateCalls::OnCodecState(const ipc::CodecState& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Open(std::move(fd), message.bytes));
  Take({ipc::Message(message).index()}, {.arena = std::move(arena)});
  return absl::OkStatus();
}

absl::Status StateCalls::OnWeights(const ipc::Weights& message, UniqueFd fd) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena, BucketArena::Open(std::move(fd), message.bytes));
  Take({ipc::Message(message).index(), message.id, message.slice},
       {.steps = message.steps, .arena = std::move(arena)});
  return absl::OkStatus();
}

absl::Status StateCalls::OnSnapshots(const ipc::Snapshots& message) {
  Take({ipc::Message(message).index()}, {.arena = std::nullopt, .snapshots = message.report});
  return absl::OkStatus();
}

absl::Status StateCalls::OnWeightsTaken(const ipc::WeightsTaken& message) {
  Take({ipc::Message(message).index(), message.id, message.slice}, {});
  return absl::OkStatus();
}

void StateCalls::Fail(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (failure_.ok()) failure_ = why;
  changed_.NotifyAll();
}

absl::StatusOr<BucketArena> StateCalls::GetCodecState() {
  MutexLock turn(turn_);
  THALWEG_ASSIGN_OR_RETURN(Answer answer,
                           Ask(ipc::GetCodecState{}, -1, {ipc::Message(ipc::CodecState{}).index()},
                               "send the codec's state"));
  return *std::move(answer.arena);
}

absl::Status StateCalls::SetCodecState(std::span<const std::byte> state) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena,
                           BucketArena::Create("thalweg-codec-state", state.size(), true));
  std::ranges::copy(state, arena.payload());
  return tell_(ipc::CodecState{state.size()}, arena.fd());
}

absl::StatusOr<SnapshotReport> StateCalls::Snapshots(const ipc::GetSnapshots& question) {
  MutexLock turn(turn_);
  THALWEG_ASSIGN_OR_RETURN(
      Answer answer,
      Ask(question, -1, {ipc::Message(ipc::Snapshots{}).index()}, "answer about snapshots"));
  return std::move(answer.snapshots);
}

absl::StatusOr<WeightsSlice> StateCalls::GetWeights(BucketId bucket, uint32_t slice) {
  MutexLock turn(turn_);
  THALWEG_ASSIGN_OR_RETURN(
      const Answer answer,
      Ask(ipc::GetWeights{bucket, slice}, -1, {ipc::Message(ipc::Weights{}).index(), bucket, slice},
          absl::StrCat("send the weights of bucket ", ToString(bucket))));
  const std::span values(reinterpret_cast<const float*>(answer.arena->payload()),
                         answer.arena->payload_bytes() / sizeof(float));
  return WeightsSlice{{values.begin(), values.end()}, answer.steps};
}

absl::Status StateCalls::SetWeights(BucketId bucket, uint32_t slice, std::span<const float> values,
                                    uint64_t steps) {
  THALWEG_ASSIGN_OR_RETURN(BucketArena arena,
                           BucketArena::Create("thalweg-weights", values.size_bytes(), true));
  std::ranges::copy(std::as_bytes(values), arena.payload());
  MutexLock turn(turn_);
  return Ask(ipc::Weights{bucket, slice, steps, values.size_bytes()}, arena.fd(),
             {ipc::Message(ipc::WeightsTaken{}).index(), bucket, slice},
             absl::StrCat("take the weights of bucket ", ToString(bucket)))
      .status();
}

}  // namespace thalweg
