// ControlCall is one unary call of control.proto on the aggregator's side.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/poller.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg {

class ControlCalls;

// A ControlCall is thread-safe. ControlCalls keeps it until gRPC has completed its last operation.
class ControlCall final : public std::enable_shared_from_this<ControlCall> {
 public:
  template <typename Base>
  using Part1 = v1::Control::WithRawMethod_Probe<v1::Control::WithRawMethod_Challenge<
      v1::Control::WithRawMethod_Join<v1::Control::WithRawMethod_RegisterBucket<Base>>>>;
  template <typename Base>
  using Part2 = v1::Control::WithRawMethod_MakeGroup<
      v1::Control::WithRawMethod_ReadResidual<v1::Control::WithRawMethod_WriteResidual<
          v1::Control::WithRawMethod_Heartbeat<v1::Control::WithRawMethod_Leave<Base>>>>>;
  template <typename Base>
  using Part3 = v1::Control::WithRawMethod_SetSettings<v1::Control::WithRawMethod_ReadWeights<
      v1::Control::WithRawMethod_WriteWeights<v1::Control::WithRawMethod_Snapshots<Base>>>>;
  // Requests arrive as bytes, so that no poller parses a long one.
  using Service = Part1<Part2<Part3<v1::Control::Service>>>;
  using Writer = grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>;

  // A Method says how gRPC is asked for the next call of a method, and what is done with it.
  struct Method {
    using Request = void (*)(Service&, grpc::ServerContext*, grpc::ByteBuffer*, Writer*,
                             grpc::ServerCompletionQueue*, void* tag);
    Request request;
    // Runs on a poller and must lead to one Finish, there or on another thread.
    std::function<void(const std::shared_ptr<ControlCall>&)> handle;
  };

  // Waits on `queue`'s thread for a call; then waits for the next one with a new ControlCall, until
  // the server ends. All references must outlive gRPC's use of the call.
  static void Accept(Service& service, const Method& method, grpc::ServerCompletionQueue& queue,
                     ControlCalls& calls);

  const grpc::ServerContext& context() const { return context_; }
  // Only the handler uses the request; parsing empties it.
  grpc::ByteBuffer& request() { return request_; }

  // Answers the call. Returns false if the caller has gone: it was cancelled, its connection broke,
  // or its deadline has passed. Call once.
  bool Finish(const grpc::Status& status, const grpc::ByteBuffer& response);
  // Says whether the caller has gone, as far as is known: it may have made the call again.
  bool HasGone();
  // Calls `gone` when the caller goes before Finish: at once, or later from a poller. Call at most
  // once; after Finish it does nothing.
  void WhenGone(std::function<void()> gone);
  // Keeps something until gRPC has sent the answer.
  void Keep(std::shared_ptr<void> place);
  // Cancels the call if its answer has not been sent since `before`: the peer does not read it.
  void CutIfUnread(TimePoint before);

 private:
  ControlCall(Service& service, const Method& method, grpc::ServerCompletionQueue& queue,
              ControlCalls& calls)
      : service_(service), method_(method), queue_(queue), calls_(calls) {}

  void OnAccepted(bool ok);
  // Runs when the caller has gone, or has got the answer.
  void OnDone(bool ok);
  // Runs when the answer has been sent or dropped, and at the end of OnDone.
  void OnEnd(bool ok);

  Service& service_;
  const Method& method_;
  grpc::ServerCompletionQueue& queue_;
  ControlCalls& calls_;
  std::shared_ptr<ControlCall> self_;  // set until OnAccepted
  grpc::ServerContext context_;
  grpc::ByteBuffer request_;
  Writer writer_{&context_};
  std::atomic<int> ends_left_{2};

  Mutex mutex_;
  std::function<void()> when_gone_ ABSL_GUARDED_BY(mutex_);
  std::optional<TimePoint> answered_ ABSL_GUARDED_BY(mutex_);
  bool has_gone_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<void> kept_ ABSL_GUARDED_BY(mutex_);

  MemberCompletion<ControlCall, &ControlCall::OnAccepted> accepted_{*this};
  MemberCompletion<ControlCall, &ControlCall::OnDone> done_{*this};
  MemberCompletion<ControlCall, &ControlCall::OnEnd> finished_{*this};
};

// ControlCalls hold the calls that gRPC has not completed. They are thread-safe.
class ControlCalls {
 public:
  // Keeps the call. Returns false after Close, when it must be refused and gRPC may not be asked
  // for another one.
  [[nodiscard]] bool Add(const std::shared_ptr<ControlCall>& call);
  void Remove(const std::shared_ptr<ControlCall>& call);
  void Close();
  // Waits until no call is left; returns false at the deadline.
  bool WaitEmpty(TimePoint deadline);
  void CutUnread(TimePoint before);

 private:
  Mutex mutex_;
  CondVar changed_;
  std::set<std::shared_ptr<ControlCall>> calls_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace thalweg
