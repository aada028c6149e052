// ControlClient makes the calls of control.proto to one shard on another machine.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/exchange/join.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/channel_options.h"
#include "server/transport/wire/status_codec.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg {

// A ControlClient is thread-safe. Its errors name the shard.
class ControlClient {
 public:
  struct Options {
    std::string name;  // of the shard, in errors: "aggregator shard 1 at …"
    bool has_tls = false;
    Duration grace{};  // how long a call that must be harmless is repeated when connections break
  };
  ControlClient(Options options, std::shared_ptr<grpc::Channel> channel);

  template <typename Request, typename Response>
  using Method = grpc::Status (v1::Control::Stub::*)(grpc::ClientContext*, const Request&,
                                                     Response*);

  // Makes a call once. The error does not name the shard yet; it is Cancelled if `stop` ended it.
  template <typename Request, typename Response>
  absl::Status Call(Method<Request, Response> method, const Request& request, Response* response,
                    TimePoint deadline, const std::stop_token& stop = {}) {
    return FromGrpc(CallOnce(method, request, response, deadline, stop));
  }

  // Repeats a call, which must be harmless, when the connection breaks, while the grace lasts.
  template <typename Request, typename Response>
  absl::Status CallAgain(Method<Request, Response> method, const Request& request,
                         Response* response, TimePoint deadline) {
    const TimePoint give_up = std::min(deadline, Now() + options_.grace);
    grpc::Status status = CallOnce(method, request, response, deadline);
    while (status.error_code() == grpc::StatusCode::UNAVAILABLE && !IsOurs(status) &&
           WaitToCallAgain(give_up)) {
      status = CallOnce(method, request, response, deadline);
    }
    return Named(FromGrpc(status));
  }

  // Does the same, and repeats the call until `deadline` while the shard has too much to do.
  template <typename Request, typename Response>
  absl::Status CallWhenFree(Method<Request, Response> method, const Request& request,
                            Response* response, TimePoint deadline) {
    Duration pause = kFirstPause;
    absl::Status status = CallAgain(method, request, response, deadline);
    while (absl::IsResourceExhausted(status) && Pause(pause, deadline)) {
      pause = std::min<Duration>(2 * pause, kLongestPause);
      status = CallAgain(method, request, response, deadline);
    }
    return status;
  }

  // Returns what `call` returns, or says that there is no connection. The call starts when there is
  // one, or when the time left is too short to wait for one. Cancelled: `stop` ended the wait.
  absl::Status WhenConnected(TimePoint deadline, const std::stop_token& stop,
                             const std::function<absl::Status()>& call);

  // Proves the request's identity with its signer, if it has one, and joins. Without a signer the
  // shard refuses any identity.
  absl::Status Join(const JoinRequest& request, v1::JoinResponse* response, TimePoint deadline);

  const std::string& name() const { return options_.name; }
  absl::Status Named(const absl::Status& status) const { return Prefixed(name(), status); }

 private:
  // Between two calls to a shard that has too much to do.
  static constexpr Duration kFirstPause = std::chrono::milliseconds(10);
  static constexpr Duration kLongestPause = std::chrono::milliseconds(200);

  // Waits for so long; returns false at once if `give_up` is not later.
  static bool Pause(Duration time, TimePoint give_up);
  // Waits a moment, and then for a connection; returns false at `give_up`.
  bool WaitToCallAgain(TimePoint give_up);
  // Returns whether there is a connection; false at `give_up`, or when `stop` ends the wait.
  bool WaitForConnection(TimePoint give_up, const std::stop_token& stop);
  template <typename Request, typename Response>
  grpc::Status CallOnce(Method<Request, Response> method, const Request& request,
                        Response* response, TimePoint deadline, const std::stop_token& stop = {}) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(deadline));
    const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
    return (stub_.get()->*method)(&context, request, response);
  }

  const Options options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Control::Stub> stub_;
};

}  // namespace thalweg
