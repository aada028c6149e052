// Losses in a JoinRequest and a JoinResponse, which have the same fields for them, and the answer
// to a heartbeat, which names the nodes that were lost.
#pragma once

#include <chrono>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/exchange/join.h"
#include "core/exchange/member.h"
#include "server/base/printable.h"
#include "thalweg/v1/control.pb.h"

namespace thalweg {

// Each heartbeat is answered with the reasons for all nodes that were lost.
inline constexpr size_t kMaxLostBytes = 250;
inline constexpr std::chrono::milliseconds kMaxGrace = std::chrono::hours(1);

template <class Proto>
void SetLosses(const Losses& losses, Proto* proto) {
  using std::chrono::milliseconds;
  proto->set_min_nodes(losses.min_nodes);
  proto->set_loss_grace_ms(
      static_cast<uint64_t>(std::chrono::duration_cast<milliseconds>(losses.grace).count()));
}

template <class Proto>
absl::StatusOr<Losses> LossesOf(const Proto& proto) {
  if (proto.loss_grace_ms() > static_cast<uint64_t>(kMaxGrace.count())) {
    return absl::InvalidArgumentError(absl::StrCat("loss_grace_ms is ", proto.loss_grace_ms(),
                                                   ", expected at most ", kMaxGrace.count()));
  }
  return Losses{proto.min_nodes(), std::chrono::milliseconds(proto.loss_grace_ms())};
}

inline v1::HeartbeatResponse ToProto(const Pulse& pulse) {
  v1::HeartbeatResponse proto;
  proto.set_clock(pulse.clock.clock);
  proto.set_clock_nanos(static_cast<uint64_t>(pulse.clock.nanos));
  for (const LostNode& lost : pulse.lost) {
    v1::LostNode& added = *proto.add_lost();
    added.set_node(lost.node);
    added.set_why(Printable(lost.why, kMaxLostBytes));
  }
  return proto;
}

inline Pulse FromProto(const v1::HeartbeatResponse& proto) {
  Pulse pulse{{proto.clock(), static_cast<int64_t>(proto.clock_nanos())}, {}};
  for (const v1::LostNode& lost : proto.lost()) {
    pulse.lost.push_back(
        {Printable(lost.node(), kMaxReasonBytes), Printable(lost.why(), kMaxReasonBytes)});
  }
  return pulse;
}

}  // namespace thalweg
