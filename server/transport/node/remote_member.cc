#include "server/transport/node/remote_member.h"

#include <chrono>
#include <string>
#include <utility>

#include "core/base/status_macros.h"
#include "server/transport/poller.h"
#include "server/transport/wire/control_codec.h"
#include "server/transport/wire/losses_codec.h"
#include "server/transport/wire/status_codec.h"
#include "server/transport/wire/update_codec.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

constexpr Duration kLeaveTime = std::chrono::seconds(2);

absl::Status HasLeft() { return absl::FailedPreconditionError("the node has left"); }

}  // namespace

RemoteMember::RemoteMember(std::unique_ptr<ControlClient> control, SessionToken token, Terms terms,
                           std::shared_ptr<ShardStreams> streams)
    : control_(std::move(control)),
      token_(token),
      terms_(std::move(terms)),
      streams_(std::move(streams)) {}

std::shared_ptr<ShardStreams> RemoteMember::streams() {
  MutexLock lock(mutex_);
  return streams_;
}

template <typename Request, typename Response>
absl::Status RemoteMember::Call(ControlClient::Method<Request, Response> method, Request request,
                                Response* response, TimePoint deadline) {
  if (streams() == nullptr) return HasLeft();
  request.set_token(token_);
  return control_->CallAgain(method, request, response, deadline);
}

template <typename Request, typename Response>
absl::Status RemoteMember::Read(ControlClient::Method<Request, Response> method, Request request,
                                Response* response, TimePoint deadline) {
  if (streams() == nullptr) return HasLeft();
  request.set_token(token_);
  return control_->CallWhenFree(method, request, response, deadline);
}

absl::Status RemoteMember::Register(const BucketAnnouncement& bucket, TimePoint deadline) {
  v1::RegisterBucketResponse response;
  return Call(&v1::Control::Stub::RegisterBucket, ToProto(token_, bucket), &response, deadline);
}

absl::Status RemoteMember::MakeGroup(const Group& group, TimePoint deadline) {
  v1::MakeGroupResponse response;
  return Call(&v1::Control::Stub::MakeGroup, ToProto(token_, group), &response, deadline);
}

absl::Status RemoteMember::Contribute(Contribution contribution) {
  const std::shared_ptr<ShardStreams> streams = this->streams();
  if (streams == nullptr) return HasLeft();
  return streams->Send(HeaderOf(contribution), contribution.payload);
}

absl::Status RemoteMember::Supply(RoundResult result) {
  const std::shared_ptr<ShardStreams> streams = this->streams();
  if (streams == nullptr) return HasLeft();
  return streams->Send(HeaderOf(result), result.payload);
}

absl::StatusOr<std::vector<float>> RemoteMember::ReadResidual(BucketId bucket, uint32_t chunk,
                                                              TimePoint deadline) {
  v1::ReadResidualRequest request;
  *request.mutable_bucket() = ToProto(bucket);
  request.set_chunk(chunk);
  v1::ReadResidualResponse response;
  THALWEG_RETURN_IF_ERROR(Read(&v1::Control::Stub::ReadResidual, request, &response, deadline));
  absl::StatusOr<std::vector<float>> values = FloatsFromBytes(response.values());
  if (!values.ok()) return control_->Named(values.status());
  return values;
}

absl::Status RemoteMember::WriteResidual(BucketId bucket, uint32_t chunk,
                                         std::span<const float> values, TimePoint deadline) {
  v1::WriteResidualRequest request;
  *request.mutable_bucket() = ToProto(bucket);
  request.set_chunk(chunk);
  request.set_values(FloatsToBytes(values));
  v1::WriteResidualResponse response;
  return Call(&v1::Control::Stub::WriteResidual, request, &response, deadline);
}

absl::Status RemoteMember::SetSettings(uint64_t number, const UpdateStep& step,
                                       TimePoint deadline) {
  v1::SetSettingsResponse response;
  return Call(&v1::Control::Stub::SetSettings, ToProto(number, step), &response, deadline);
}

absl::StatusOr<WeightsSlice> RemoteMember::ReadWeights(BucketId bucket, uint32_t chunk,
                                                       uint32_t slice, TimePoint deadline) {
  v1::ReadWeightsRequest request;
  *request.mutable_bucket() = ToProto(bucket);
  request.set_chunk(chunk);
  request.set_slice(slice);
  v1::ReadWeightsResponse response;
  THALWEG_RETURN_IF_ERROR(Read(&v1::Control::Stub::ReadWeights, request, &response, deadline));
  auto values = FloatsFromBytes(response.values());
  if (!values.ok()) return control_->Named(values.status());
  return WeightsSlice{*std::move(values), response.steps()};
}

absl::Status RemoteMember::WriteWeights(BucketId bucket, uint32_t chunk, uint32_t slice,
                                        WeightsSlice weights, TimePoint deadline) {
  v1::WriteWeightsRequest request;
  *request.mutable_bucket() = ToProto(bucket);
  request.set_chunk(chunk);
  request.set_slice(slice);
  request.set_values(FloatsToBytes(weights.values));
  request.set_steps(weights.steps);
  v1::WriteWeightsResponse response;
  return Call(&v1::Control::Stub::WriteWeights, request, &response, deadline);
}

absl::StatusOr<SnapshotReport> RemoteMember::Snapshots(const SnapshotCall& call,
                                                       TimePoint deadline) {
  v1::SnapshotsResponse response;
  const auto method = &v1::Control::Stub::Snapshots;
  THALWEG_RETURN_IF_ERROR(call.action == SnapshotAction::kRestore
                              ? Read(method, ToProto(call), &response, deadline)
                              : Call(method, ToProto(call), &response, deadline));
  auto report = FromProto(response);
  if (!report.ok()) return control_->Named(report.status());
  return report;
}

absl::StatusOr<Pulse> RemoteMember::Heartbeat(TimePoint deadline) {
  v1::HeartbeatResponse response;
  THALWEG_RETURN_IF_ERROR(
      Call(&v1::Control::Stub::Heartbeat, v1::HeartbeatRequest(), &response, deadline));
  return FromProto(response);
}

void RemoteMember::Leave(const absl::Status& reason) {
  std::shared_ptr<ShardStreams> streams;
  {
    MutexLock lock(mutex_);
    streams.swap(streams_);
  }
  if (streams == nullptr) return;
  streams->Detach();

  const grpc::Status why = ToGrpc(reason);
  v1::LeaveRequest request;
  request.set_token(token_);
  request.set_code(static_cast<uint32_t>(why.error_code()));
  request.set_reason(why.error_message());
  v1::LeaveResponse response;
  const absl::Status left =
      control_->CallAgain(&v1::Control::Stub::Leave, request, &response, Now() + kLeaveTime);
  if (left.ok()) {
    streams->Finish();
    if (streams->WaitDone(Now() + kLeaveTime)) return;
  } else {
    spdlog::info("this node could not say that it leaves: {}", std::string(left.message()));
  }
  streams->Cancel();
  if (!streams->WaitDone(Now() + kCancelTime)) {
    spdlog::error("{}: a stream has not ended after it was cancelled", control_->name());
  }
}

}  // namespace thalweg
