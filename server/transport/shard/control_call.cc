#include "server/transport/shard/control_call.h"

#include <utility>
#include <vector>

namespace thalweg {

void ControlCall::Accept(Service& service, const Method& method, grpc::ServerCompletionQueue& queue,
                         ControlCalls& calls) {
  std::shared_ptr<ControlCall> call(new ControlCall(service, method, queue, calls));
  call->self_ = call;
  call->context_.AsyncNotifyWhenDone(call->done_.Tag());
  method.request(service, &call->context_, &call->request_, &call->writer_, &queue,
                 call->accepted_.Tag());
}

void ControlCall::OnAccepted(bool ok) {
  const std::shared_ptr<ControlCall> self = std::move(self_);
  if (!ok) return;  // the server is stopping; done_ does not happen either
  // The set takes the call first: its queue, which this thread polls, is shut down only when the
  // set is empty, and accepts no request afterwards.
  if (calls_.Add(self)) {
    Accept(service_, method_, queue_, calls_);
    method_.handle(self);
  } else {
    Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is stopping"), {});
  }
}

bool ControlCall::Finish(const grpc::Status& status, const grpc::ByteBuffer& response) {
  bool has_gone;
  {
    MutexLock lock(mutex_);
    has_gone = has_gone_;
    answered_ = Now();
    when_gone_ = nullptr;
  }
  if (status.ok()) {
    writer_.Finish(response, status, finished_.Tag());
  } else {
    writer_.FinishWithError(status, finished_.Tag());
  }
  return !has_gone;
}

bool ControlCall::HasGone() {
  MutexLock lock(mutex_);
  return has_gone_;
}

void ControlCall::WhenGone(std::function<void()> gone) {
  {
    MutexLock lock(mutex_);
    if (answered_) return;
    if (!has_gone_) {
      when_gone_ = std::move(gone);
      return;
    }
  }
  gone();
}

void ControlCall::Keep(std::shared_ptr<void> place) {
  MutexLock lock(mutex_);
  kept_ = std::move(place);
}

void ControlCall::CutIfUnread(TimePoint before) {
  {
    MutexLock lock(mutex_);
    if (!answered_ || *answered_ >= before) return;
  }
  context_.TryCancel();
}

void ControlCall::OnDone(bool /*ok*/) {
  std::function<void()> gone;
  {
    MutexLock lock(mutex_);
    has_gone_ = context_.IsCancelled();
    gone.swap(when_gone_);
  }
  if (gone) gone();
  OnEnd(true);
}

void ControlCall::OnEnd(bool /*ok*/) {
  if (--ends_left_ == 0) calls_.Remove(shared_from_this());
}

bool ControlCalls::Add(const std::shared_ptr<ControlCall>& call) {
  MutexLock lock(mutex_);
  calls_.insert(call);
  return !closed_;
}

void ControlCalls::Remove(const std::shared_ptr<ControlCall>& call) {
  MutexLock lock(mutex_);
  calls_.erase(call);
  changed_.NotifyAll();
}

void ControlCalls::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
}

bool ControlCalls::WaitEmpty(TimePoint deadline) {
  MutexLock lock(mutex_);
  return changed_.WaitUntil(
      mutex_, deadline, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_.empty(); });
}

void ControlCalls::CutUnread(TimePoint before) {
  std::vector<std::shared_ptr<ControlCall>> calls;
  {
    MutexLock lock(mutex_);
    calls.assign(calls_.begin(), calls_.end());
  }
  for (const auto& call : calls) call->CutIfUnread(before);
}

}  // namespace thalweg
