#include "server/transport/shard/control_service.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "server/transport/link_probe.h"
#include "server/transport/proofs.h"
#include "server/transport/wire/control_codec.h"
#include "server/transport/wire/field_count.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/wire/losses_codec.h"
#include "server/transport/wire/status_codec.h"
#include "server/transport/wire/update_codec.h"

namespace thalweg {
namespace {

// This bound applies to callers that set no deadline, or one that is later.
constexpr Duration kLongestCall = std::chrono::hours(1);
// The shard answers this much before the caller's deadline, so that the answer arrives in time.
constexpr Duration kAnswerTime = std::chrono::milliseconds(500);

// Requests that carry no gradients, layouts or padding: a policy of codecs is the longest part.
constexpr size_t kShortRequest = 256 << 10;
// A Join that resumes a job also carries rounds, as varints.
constexpr size_t kLongestJoin = kShortRequest + kMaxResumedChunks * 10;
// A poller copies at most this much of a request.
constexpr size_t kPollersRequest = 16 << 10;
// A bucket's announcement has a few fields besides its tensors.
constexpr uint64_t kMaxFields = kMaxBucketTensors + 64;
// Parsing may take several times a request's length in memory, so longer ones are parsed one by
// one.
constexpr size_t kLongParse = 1 << 20;
constexpr char kReads[] = "residuals or weights are being read";

// Returns when the shard must answer, so that the caller gets the shard's reason and not gRPC's
// "Deadline Exceeded".
TimePoint AnswerBy(const grpc::ServerContext& context) {
  const auto left = context.deadline() - std::chrono::system_clock::now();
  const Duration bounded = std::clamp<Duration>(
      std::chrono::duration_cast<Duration>(std::min<decltype(left)>(left, kLongestCall)),
      Duration::zero(), kLongestCall);
  return Now() + bounded - std::min<Duration>(bounded / 10, kAnswerTime);
}

absl::Status GaveUp() { return absl::UnavailableError("gave up while the job was joining"); }

// Both answer the call; see ControlCall::Finish.
bool Answer(ControlCall& call, const google::protobuf::Message& response) {
  grpc::ByteBuffer bytes;
  bool own = false;
  const grpc::Status written =
      grpc::SerializationTraits<google::protobuf::Message>::Serialize(response, &bytes, &own);
  return call.Finish(written, bytes);
}

bool Refuse(ControlCall& call, const absl::Status& why) { return call.Finish(ToGrpc(why), {}); }

template <typename Response>
void AnswerWith(ControlCall& call, const absl::Status& status) {
  status.ok() ? Answer(call, Response()) : Refuse(call, status);
}

// Returns a function that asks gRPC for the next call of a method.
template <auto kRequest>
constexpr ControlCall::Method::Request Requests() {
  return [](ControlCall::Service& service, grpc::ServerContext* context, grpc::ByteBuffer* request,
            ControlCall::Writer* writer, grpc::ServerCompletionQueue* queue,
            void* tag) { (service.*kRequest)(context, request, writer, queue, queue, tag); };
}

}  // namespace

ControlService::ControlService(ServedShard& shard, Authorizer& authorizer, NodeTable& nodes,
                               Duration challenge_lifetime, uint32_t max_waiting_joins)
    : shard_(shard),
      authorizer_(authorizer),
      nodes_(nodes),
      challenges_(challenge_lifetime),
      waiting_joins_(max_waiting_joins) {
  using S = ControlCall::Service;
  const auto cheap = Cost::kCheap;
  const auto expensive = Cost::kExpensive;
  const auto longest = size_t{kMaxFrameBytes};
  Add(Requests<&S::RequestProbe>(), &ControlService::Probe, cheap, longest);
  Add(Requests<&S::RequestChallenge>(), &ControlService::Challenge, cheap, kShortRequest);
  Add(Requests<&S::RequestJoin>(), &ControlService::Join, expensive, kLongestJoin);
  Add(Requests<&S::RequestRegisterBucket>(), &ControlService::RegisterBucket, expensive, longest);
  Add(Requests<&S::RequestMakeGroup>(), &ControlService::MakeGroup, expensive, kShortRequest);
  Add(Requests<&S::RequestReadResidual>(), &ControlService::ReadResidual, expensive, kShortRequest);
  Add(Requests<&S::RequestWriteResidual>(), &ControlService::WriteResidual, expensive, longest);
  Add(Requests<&S::RequestSetSettings>(), &ControlService::SetSettings, expensive, longest);
  Add(Requests<&S::RequestReadWeights>(), &ControlService::ReadWeights, expensive, kShortRequest);
  Add(Requests<&S::RequestWriteWeights>(), &ControlService::WriteWeights, expensive, longest);
  Add(Requests<&S::RequestSnapshots>(), &ControlService::Snapshots, expensive, kShortRequest);
  Add(Requests<&S::RequestHeartbeat>(), &ControlService::Heartbeat, cheap, kShortRequest);
  Add(Requests<&S::RequestLeave>(), &ControlService::Leave, cheap, kShortRequest);
}

void ControlService::Add(ControlCall::Method::Request request, Handler handler, Cost cost,
                         size_t max_bytes) {
  const auto handle = [this, handler, cost, max_bytes](const CallPtr& call) {
    const size_t bytes = call->request().Length();
    if (bytes > max_bytes) {
      Refuse(*call, absl::ResourceExhaustedError(absl::StrCat(
                        "a request of ", bytes, " bytes, expected at most ", max_bytes)));
    } else if (cost == Cost::kCheap && bytes <= kPollersRequest) {
      (this->*handler)(call);
    } else if (!pool_.TryRun([this, handler, call] { RunUnlessGone(handler, call); })) {
      Refuse(*call, absl::ResourceExhaustedError(absl::StrCat(
                        kMaxWaitingWork, " control calls wait here already, try again later")));
    }
  };
  methods_.push_back(
      std::make_unique<const ControlCall::Method>(ControlCall::Method{request, handle}));
}

void ControlService::RunUnlessGone(Handler handler, const CallPtr& call) {
  if (!call->HasGone()) return (this->*handler)(call);
  // What it wants may be out of date: the same call has come again, and the job has gone on.
  Refuse(*call, absl::CancelledError("the caller has gone"));
}

void ControlService::Accept(grpc::ServerCompletionQueue& queue) {
  for (const auto& method : methods_) ControlCall::Accept(service_, *method, queue, calls_);
}

template <typename Message>
bool ControlService::Parse(ControlCall& call, Message* message) {
  if (!HasAtMostFields(call.request(), kMaxFields)) {
    Refuse(call, absl::InvalidArgumentError(
                     absl::StrCat("the request is malformed, or has more than the ",
                                  kMaxBucketTensors, " tensors that a bucket may have")));
    return false;
  }
  const auto parse = [&] {
    return grpc::SerializationTraits<Message>::Deserialize(&call.request(), message);
  };
  grpc::Status parsed;
  if (call.request().Length() > kLongParse) {
    MutexLock lock(long_parse_);
    parsed = parse();
  } else {
    parsed = parse();
  }
  if (!parsed.ok()) call.Finish(parsed, {});
  return parsed.ok();
}

std::shared_ptr<NodeStreams> ControlService::NodeOf(ControlCall& call, SessionToken token) {
  absl::StatusOr<std::shared_ptr<NodeStreams>> node = nodes_.Find(token);
  const absl::Status owned =
      node.ok() ? authorizer_.CheckOwner(call.context(), (*node)->key().principal) : node.status();
  if (owned.ok()) return *std::move(node);
  Refuse(call, owned);
  return nullptr;
}

void ControlService::Probe(const CallPtr& call) {
  v1::ProbeRequest request;
  if (!Parse(*call, &request)) return;
  const size_t bytes = request.padding().size();
  AnswerWith<v1::ProbeResponse>(
      *call, bytes <= kMaxProbeBytes
                 ? absl::OkStatus()
                 : absl::InvalidArgumentError(absl::StrCat(
                       "a probe of ", bytes, " bytes, expected at most ", kMaxProbeBytes)));
}

void ControlService::Challenge(const CallPtr& call) {
  v1::ChallengeResponse response;
  response.set_nonce(challenges_.Draw(Now()));
  Answer(*call, response);
}

void ControlService::Join(const CallPtr& call) {
  v1::JoinRequest request;
  if (!Parse(*call, &request)) return;
  absl::StatusOr<JoinRequest> parsed = FromProto(request);
  if (!parsed.ok()) {
    Refuse(*call, parsed.status());
    return;
  }
  if (const absl::Status proved = CheckProof(request, challenges_, Now()); !proved.ok()) {
    authorizer_.NotProved(call->context(), proved);
    Refuse(*call, proved);
    return;
  }
  parsed->identity = request.identity();
  parsed->peer = NamesOf(call->context());
  parsed->place = AddressOf(call->context());
  std::shared_ptr<void> place = waiting_joins_.Take(parsed->place);
  if (place == nullptr) {
    Refuse(*call, absl::ResourceExhaustedError(absl::StrCat(
                      "job '", parsed->job,
                      "': too many nodes, or too many of this address, wait "
                      "here for the other nodes of their jobs already, try again later")));
    return;
  }
  call->Keep(std::move(place));
  const std::shared_ptr<NodeStreams> node =
      nodes_.Make(parsed->identity, shard_.HasPolicy() ? parsed->peer->Principal() : "",
                  LeaseFor(parsed->grace, parsed->num_shards));
  const auto joined = [this, call, node](absl::StatusOr<std::unique_ptr<Member>> member) {
    if (!member.ok()) {
      Refuse(*call, member.status());
      return;
    }
    const v1::JoinResponse response = ToProto(node->key().token, (*member)->terms());
    nodes_.Add(node, *std::move(member));
    // A caller that has gone will not use the membership; without Leave, the other nodes would wait
    // for its lease to end.
    if (!Answer(*call, response)) node->Leave(GaveUp());
  };
  auto give_up = shard_.BeginJoin(*parsed, node, AnswerBy(call->context()), joined);
  if (give_up != nullptr) call->WhenGone([give_up] { give_up(GaveUp()); });
}

void ControlService::RegisterBucket(const CallPtr& call) {
  v1::RegisterBucketRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  const absl::StatusOr<BucketAnnouncement> bucket = FromProto(request);
  AnswerWith<v1::RegisterBucketResponse>(
      *call,
      bucket.ok() ? node->member().Register(*bucket, AnswerBy(call->context())) : bucket.status());
}

void ControlService::MakeGroup(const CallPtr& call) {
  v1::MakeGroupRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  const absl::StatusOr<Group> group = FromProto(request);
  AnswerWith<v1::MakeGroupResponse>(
      *call,
      group.ok() ? node->member().MakeGroup(*group, AnswerBy(call->context())) : group.status());
}

bool ControlService::TakePlace(FairSemaphore& places, const char* what, ControlCall& call) {
  std::shared_ptr<void> place = places.Take(AddressOf(call.context()));
  if (place == nullptr) {
    Refuse(call, absl::ResourceExhaustedError(absl::StrCat(
                     "too many ", what, " here, or from this address, try again later")));
    return false;
  }
  call.Keep(std::move(place));
  return true;
}

void ControlService::ReadResidual(const CallPtr& call) {
  v1::ReadResidualRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  if (!TakePlace(reads_, kReads, *call)) return;
  const auto values = node->member().ReadResidual(FromProto(request.bucket()), request.chunk(),
                                                  AnswerBy(call->context()));
  if (!values.ok()) {
    Refuse(*call, values.status());
    return;
  }
  v1::ReadResidualResponse response;
  response.set_values(FloatsToBytes(*values));
  Answer(*call, response);
}

void ControlService::WriteResidual(const CallPtr& call) {
  v1::WriteResidualRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  const auto values = FloatsFromBytes(request.values());
  AnswerWith<v1::WriteResidualResponse>(
      *call, values.ok()
                 ? node->member().WriteResidual(FromProto(request.bucket()), request.chunk(),
                                                *values, AnswerBy(call->context()))
                 : values.status());
}

void ControlService::SetSettings(const CallPtr& call) {
  v1::SetSettingsRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  const absl::StatusOr<UpdateStep> step = FromProto(request);
  AnswerWith<v1::SetSettingsResponse>(
      *call, step.ok()
                 ? node->member().SetSettings(request.number(), *step, AnswerBy(call->context()))
                 : step.status());
}

void ControlService::ReadWeights(const CallPtr& call) {
  v1::ReadWeightsRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  if (!TakePlace(reads_, kReads, *call)) return;
  const auto slice = node->member().ReadWeights(FromProto(request.bucket()), request.chunk(),
                                                request.slice(), AnswerBy(call->context()));
  if (!slice.ok()) {
    Refuse(*call, slice.status());
    return;
  }
  v1::ReadWeightsResponse response;
  response.set_values(FloatsToBytes(slice->values));
  response.set_steps(slice->steps);
  Answer(*call, response);
}

void ControlService::WriteWeights(const CallPtr& call) {
  v1::WriteWeightsRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  absl::StatusOr<std::vector<float>> values = FloatsFromBytes(request.values());
  if (!values.ok()) {
    Refuse(*call, values.status());
    return;
  }
  WeightsSlice slice;
  slice.values = *std::move(values);
  slice.steps = request.steps();
  AnswerWith<v1::WriteWeightsResponse>(
      *call,
      node->member().WriteWeights(FromProto(request.bucket()), request.chunk(), request.slice(),
                                  std::move(slice), AnswerBy(call->context())));
}

void ControlService::Snapshots(const CallPtr& call) {
  v1::SnapshotsRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  const absl::StatusOr<SnapshotCall> parsed = FromProto(request);
  const bool restores = parsed.ok() && parsed->action == SnapshotAction::kRestore;
  if (restores && !TakePlace(restores_, "snapshots are being restored", *call)) return;
  const auto report =
      parsed.ok() ? node->member().Snapshots(*parsed, AnswerBy(call->context())) : parsed.status();
  report.ok() ? Answer(*call, ToProto(*report)) : Refuse(*call, report.status());
}

void ControlService::Heartbeat(const CallPtr& call) {
  v1::HeartbeatRequest request;
  if (!Parse(*call, &request)) return;
  const auto node = NodeOf(*call, request.token());
  if (node == nullptr) return;
  const auto pulse = node->member().Heartbeat(AnswerBy(call->context()));
  pulse.ok() ? Answer(*call, ToProto(*pulse)) : Refuse(*call, pulse.status());
}

void ControlService::Leave(const CallPtr& call) {
  v1::LeaveRequest request;
  if (!Parse(*call, &request)) return;
  if (nodes_.Find(request.token()).ok()) {  // otherwise it has left
    const auto node = NodeOf(*call, request.token());
    if (node == nullptr) return;
    node->Leave(StatusFromWire(request.code(), request.reason()));
  }
  Answer(*call, v1::LeaveResponse());
}

}  // namespace thalweg
