#include "server/transport/node/control_client.h"

#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/mutex.h"
#include "core/base/status_macros.h"
#include "server/transport/proofs.h"
#include "server/transport/wire/control_codec.h"

namespace thalweg {
namespace {

// A call reserves this time to find out why there is no connection.
constexpr Duration kReasonTime = std::chrono::milliseconds(500);
// A call is repeated at most once in this time: a shard that can be reached may refuse it at once.
constexpr Duration kPauseOfConnection = std::chrono::milliseconds(100);

}  // namespace

ControlClient::ControlClient(Options options, std::shared_ptr<grpc::Channel> channel)
    : options_(std::move(options)),
      channel_(std::move(channel)),
      stub_(v1::Control::NewStub(channel_)) {}

bool ControlClient::Pause(Duration time, TimePoint give_up) {
  const TimePoint next = Now() + time;
  if (next >= give_up) return false;
  Mutex mutex;
  CondVar never;
  MutexLock lock(mutex);
  never.WaitUntil(mutex, next, [] { return false; });
  return true;
}

bool ControlClient::WaitToCallAgain(TimePoint give_up) {
  return Pause(kPauseOfConnection, give_up) && channel_->WaitForConnected(ToSystemTime(give_up));
}

bool ControlClient::WaitForConnection(TimePoint give_up, const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    const TimePoint look = std::min(give_up, Now() + kPauseOfConnection);
    if (channel_->WaitForConnected(ToSystemTime(look))) return true;
    if (look == give_up) return false;
  }
  return false;
}

absl::Status ControlClient::WhenConnected(TimePoint deadline, const std::stop_token& stop,
                                          const std::function<absl::Status()>& call) {
  const TimePoint begin = Now();
  const Duration left = Remaining(deadline, begin);
  const bool connected =
      WaitForConnection(begin + left - std::min<Duration>(left / 5, kReasonTime), stop);
  if (stop.stop_requested()) return Named(absl::CancelledError("the job has ended"));
  const absl::Status status = call();
  if (!connected && (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) &&
      channel_->GetState(false) != GRPC_CHANNEL_READY) {
    return absl::UnavailableError(
        absl::StrCat(name(), " cannot be reached within ", std::round(ToSeconds(left) * 10) / 10,
                     " s: is it running, and is the address right?",
                     options_.has_tls ? " Does each end trust the other's certificate?" : "", " (",
                     status.message(), ")"));
  }
  return Named(status);
}

absl::Status ControlClient::Join(const JoinRequest& request, v1::JoinResponse* response,
                                 TimePoint deadline) {
  v1::JoinRequest proto = ToProto(request);
  if (request.signer != nullptr) {
    v1::ChallengeResponse challenge;
    const absl::Status asked = Call(&v1::Control::Stub::Challenge, v1::ChallengeRequest(),
                                    &challenge, deadline, request.stop);
    if (absl::IsUnimplemented(asked)) {
      return absl::FailedPreconditionError(
          "it cannot check a job's secret: install this node's release there");
    }
    THALWEG_RETURN_IF_ERROR(asked);
    proto.set_nonce(challenge.nonce());
    proto.set_proof(request.signer->Sign(JoinStatement(proto)));
  }
  return Call(&v1::Control::Stub::Join, proto, response, deadline, request.stop);
}

}  // namespace thalweg
