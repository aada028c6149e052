// RemoteMember is a node's membership on a shard of another machine: its calls and its streams.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/mutex.h"
#include "core/exchange/member.h"
#include "server/transport/node/control_client.h"
#include "server/transport/node/shard_streams.h"
#include "server/transport/wire/session_token.h"

namespace thalweg {

// A RemoteMember is thread-safe. See RemoteShard for what it adds to Member's contract.
class RemoteMember final : public Member {
 public:
  RemoteMember(std::unique_ptr<ControlClient> control, SessionToken token, Terms terms,
               std::shared_ptr<ShardStreams> streams);
  ~RemoteMember() override { Leave(absl::OkStatus()); }

  const Terms& terms() const override { return terms_; }
  absl::Status Register(const BucketAnnouncement& bucket, TimePoint deadline) override;
  absl::Status MakeGroup(const Group& group, TimePoint deadline) override;
  absl::Status Contribute(Contribution contribution) override;
  absl::Status Supply(RoundResult result) override;
  absl::StatusOr<std::vector<float>> ReadResidual(BucketId bucket, uint32_t chunk,
                                                  TimePoint deadline) override;
  absl::Status WriteResidual(BucketId bucket, uint32_t chunk, std::span<const float> values,
                             TimePoint deadline) override;
  absl::Status SetSettings(uint64_t number, const UpdateStep& step, TimePoint deadline) override;
  absl::StatusOr<WeightsSlice> ReadWeights(BucketId bucket, uint32_t chunk, uint32_t slice,
                                           TimePoint deadline) override;
  absl::Status WriteWeights(BucketId bucket, uint32_t chunk, uint32_t slice, WeightsSlice weights,
                            TimePoint deadline) override;
  absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall& call, TimePoint deadline) override;
  absl::StatusOr<Pulse> Heartbeat(TimePoint deadline) override;
  void Leave(const absl::Status& reason) override;

 private:
  // Makes a call that is harmless when it is repeated, unless the node has left.
  template <typename Request, typename Response>
  absl::Status Call(ControlClient::Method<Request, Response> method, Request request,
                    Response* response, TimePoint deadline);
  // Makes such a call, of which a shard answers few at a time, when its turn comes.
  template <typename Request, typename Response>
  absl::Status Read(ControlClient::Method<Request, Response> method, Request request,
                    Response* response, TimePoint deadline);
  // Returns null when the node has left.
  std::shared_ptr<ShardStreams> streams();

  const std::unique_ptr<ControlClient> control_;
  const SessionToken token_;
  const Terms terms_;

  Mutex mutex_;
  std::shared_ptr<ShardStreams> streams_ ABSL_GUARDED_BY(mutex_);  // null when the node has left
};

}  // namespace thalweg
