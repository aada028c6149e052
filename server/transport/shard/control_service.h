// ControlService implements control.proto: unary calls to a shard and its members.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/exchange/served_shard.h"
#include "grpcpp/grpcpp.h"
#include "server/identity/challenges.h"
#include "server/transport/guard/authorizer.h"
#include "server/transport/guard/fair_semaphore.h"
#include "server/transport/shard/control_call.h"
#include "server/transport/shard/node_table.h"
#include "server/transport/shard/work_pool.h"

namespace thalweg {

// The service is thread-safe. Pollers take its calls and answer those that take no longer than a
// lock; a few threads of its own do the rest, so that neither heartbeats nor gradients wait for
// proofs or for long messages. A Join that waits for other nodes occupies no thread.
class ControlService {
 public:
  // This many threads check proofs, parse buckets and copy residuals.
  static constexpr uint32_t kThreads = 4;
  // Work beyond this is refused with ResourceExhausted. Every node of the largest jobs may join and
  // announce at the same time; gRPC's quota bounds what the messages take.
  static constexpr size_t kMaxWaitingWork = 4096;
  // At most this many residuals are being read or wait for their callers to receive them.
  static constexpr uint32_t kMaxReads = 32;
  // At most this many snapshots are being restored, which takes memory and threads for long.
  static constexpr uint32_t kMaxRestores = 3;
  static_assert(kMaxRestores < kThreads);

  // The references must outlive the service. At most `max_waiting_joins` nodes wait at a
  // time; others get ResourceExhausted.
  ControlService(ServedShard& shard, Authorizer& authorizer, NodeTable& nodes,
                 Duration challenge_lifetime, uint32_t max_waiting_joins);

  // To be registered with the server before it starts.
  grpc::Service& service() { return service_; }
  // Begins to take calls from `queue`; call once for each.
  void Accept(grpc::ServerCompletionQueue& queue);
  // The calls that gRPC has not completed. Those of waiting nodes end when they are cancelled.
  ControlCalls& calls() { return calls_; }

 private:
  using CallPtr = std::shared_ptr<ControlCall>;
  using Handler = void (ControlService::*)(const CallPtr&);
  // A Cost says who may run a handler: a poller if the request is short, or only the work pool.
  enum class Cost { kCheap, kExpensive };

  // Adds a method whose requests may have `max_bytes`.
  void Add(ControlCall::Method::Request request, Handler handler, Cost cost, size_t max_bytes);

  // Runs a handler whose call has waited for a thread.
  void RunUnlessGone(Handler handler, const CallPtr& call);

  // The handlers; each answers its call, or makes the shard answer it.
  void Probe(const CallPtr& call);
  void Challenge(const CallPtr& call);
  void Join(const CallPtr& call);
  void RegisterBucket(const CallPtr& call);
  void MakeGroup(const CallPtr& call);
  void ReadResidual(const CallPtr& call);
  void WriteResidual(const CallPtr& call);
  void SetSettings(const CallPtr& call);
  void ReadWeights(const CallPtr& call);
  void WriteWeights(const CallPtr& call);
  void Snapshots(const CallPtr& call);
  void Heartbeat(const CallPtr& call);
  void Leave(const CallPtr& call);

  // Parses the call's request; answers the call and returns false if it cannot be parsed.
  template <typename Message>
  bool Parse(ControlCall& call, Message* message);

  // Takes one of the few places for calls that do this; answers the call and returns false if there
  // is none. The call keeps it.
  bool TakePlace(FairSemaphore& places, const char* what, ControlCall& call);

  // Returns the node whose membership the caller uses; null if there is none, or it is not the
  // caller's, after answering the call.
  std::shared_ptr<NodeStreams> NodeOf(ControlCall& call, SessionToken token);

  ServedShard& shard_;
  Authorizer& authorizer_;
  NodeTable& nodes_;
  Challenges challenges_;
  FairSemaphore waiting_joins_;
  FairSemaphore reads_{kMaxReads};
  FairSemaphore restores_{kMaxRestores};
  Mutex long_parse_;
  ControlCall::Service service_;
  std::vector<std::unique_ptr<const ControlCall::Method>> methods_;
  ControlCalls calls_;
  WorkPool pool_{kThreads, kMaxWaitingWork};  // declared last, because work uses everything above
};

}  // namespace thalweg
