#include "server/transport/wire/update_codec.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/wire_format.h"

namespace thalweg {

namespace {

void Set(const SnapshotId& id, v1::SnapshotId* proto) {
  proto->set_branch(id.branch);
  proto->set_step(id.step);
}

SnapshotId IdOf(const v1::SnapshotId& proto) { return {proto.branch(), proto.step()}; }

}  // namespace

v1::UpdateRule ToProto(const UpdateRule& rule) {
  v1::UpdateRule proto;
  proto.set_optimizer(static_cast<v1::Optimizer>(rule.optimizer));
  proto.set_decoupled(rule.decoupled);
  proto.set_nesterov(rule.nesterov);
  proto.set_maximize(rule.maximize);
  proto.mutable_groups()->Add(rule.groups.begin(), rule.groups.end());
  proto.set_commits(rule.commits);
  proto.set_down(static_cast<v1::WireFormat>(rule.down));
  proto.set_ahead(rule.ahead);
  proto.set_alone(rule.alone);
  proto.set_delay_aware(rule.delay_aware);
  proto.set_quorum(rule.quorum);
  proto.set_grace_ms(rule.grace_ms);
  proto.set_drops_late(rule.drops_late);
  return proto;
}

absl::StatusOr<UpdateRule> FromProto(const v1::UpdateRule& proto) {
  if (proto.groups_size() > static_cast<int>(kMaxBucketTensors)) {
    return absl::InvalidArgumentError(absl::StrCat("an update has groups of ", proto.groups_size(),
                                                   " tensors, expected at most ",
                                                   kMaxBucketTensors));
  }
  const int optimizer = proto.optimizer();
  if (optimizer != v1::OPTIMIZER_SGD && optimizer != v1::OPTIMIZER_ADAM &&
      optimizer != v1::OPTIMIZER_LAMB) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer of an update is ", optimizer, ", expected 1 to 3"));
  }
  const int down = proto.down();
  if (down < 0 || down > std::numeric_limits<uint8_t>::max() ||
      !IsValid(static_cast<WireFormat>(down))) {
    return absl::InvalidArgumentError(
        absl::StrCat("down of an update is ", down, ", expected 1 to 9 or 16 to 18"));
  }
  UpdateRule rule;
  rule.optimizer = static_cast<Optimizer>(optimizer);
  rule.decoupled = proto.decoupled();
  rule.nesterov = proto.nesterov();
  rule.maximize = proto.maximize();
  rule.commits = proto.commits();
  rule.groups.assign(proto.groups().begin(), proto.groups().end());
  rule.down = static_cast<WireFormat>(down);
  rule.ahead = proto.ahead();
  rule.alone = proto.alone();
  rule.delay_aware = proto.delay_aware();
  rule.quorum = proto.quorum();
  rule.grace_ms = proto.grace_ms();
  rule.drops_late = proto.drops_late();
  return rule;
}

v1::SetSettingsRequest ToProto(uint64_t number, const UpdateStep& step) {
  v1::SetSettingsRequest proto;
  proto.set_number(number);
  proto.set_grad_scale(step.grad_scale);
  proto.set_max_grad_norm(step.max_grad_norm);
  proto.set_grad_squares(step.grad_squares);
  proto.set_measures(step.measures);
  proto.set_waits_for_all(step.waits_for_all);
  proto.set_gives_nothing(step.gives_nothing);
  for (const GroupStep& group : step.groups) {
    v1::GroupStep& out = *proto.add_groups();
    out.set_lr(group.lr);
    out.set_weight_decay(group.weight_decay);
    out.set_momentum(group.momentum);
    out.set_dampening(group.dampening);
    out.set_beta1(group.beta1);
    out.set_beta2(group.beta2);
    out.set_eps(group.eps);
    if (group.trust_ratio != 1) out.set_trust_ratio(group.trust_ratio);
  }
  return proto;
}

absl::StatusOr<UpdateStep> FromProto(const v1::SetSettingsRequest& proto) {
  if (proto.groups_size() > static_cast<int>(kMaxUpdateGroups)) {
    return absl::InvalidArgumentError(absl::StrCat("settings of ", proto.groups_size(),
                                                   " groups, expected at most ", kMaxUpdateGroups));
  }
  UpdateStep step{.groups = {},
                  .grad_scale = proto.grad_scale(),
                  .max_grad_norm = proto.max_grad_norm(),
                  .grad_squares = proto.grad_squares(),
                  .measures = proto.measures(),
                  .waits_for_all = proto.waits_for_all(),
                  .gives_nothing = proto.gives_nothing()};
  for (const v1::GroupStep& group : proto.groups()) {
    step.groups.push_back({.lr = group.lr(),
                           .weight_decay = group.weight_decay(),
                           .momentum = group.momentum(),
                           .dampening = group.dampening(),
                           .beta1 = group.beta1(),
                           .beta2 = group.beta2(),
                           .eps = group.eps(),
                           .trust_ratio = group.has_trust_ratio() ? group.trust_ratio() : 1});
  }
  return step;
}

v1::SnapshotsRequest ToProto(const SnapshotCall& call) {
  v1::SnapshotsRequest proto;
  if (call.action == SnapshotAction::kTake) Set(call.id, proto.mutable_take());
  if (call.action == SnapshotAction::kRestore) Set(call.id, proto.mutable_restore());
  if (call.common) Set(*call.common, proto.mutable_common());
  return proto;
}

absl::StatusOr<SnapshotCall> FromProto(const v1::SnapshotsRequest& proto) {
  if (proto.has_take() && proto.has_restore()) {
    return absl::InvalidArgumentError("a snapshot to take and one to restore, expected one");
  }
  SnapshotCall call;
  if (proto.has_take()) call = {SnapshotAction::kTake, IdOf(proto.take())};
  if (proto.has_restore()) call = {SnapshotAction::kRestore, IdOf(proto.restore())};
  if (proto.has_common()) call.common = IdOf(proto.common());
  return call;
}

v1::SnapshotsResponse ToProto(const SnapshotReport& report) {
  v1::SnapshotsResponse proto;
  for (const SnapshotId& id : report.complete) Set(id, proto.add_complete());
  proto.set_is_writing(report.is_writing);
  return proto;
}

absl::StatusOr<SnapshotReport> FromProto(const v1::SnapshotsResponse& proto) {
  if (proto.complete_size() > static_cast<int>(kMaxListedSnapshots)) {
    return absl::InvalidArgumentError(absl::StrCat("a shard lists ", proto.complete_size(),
                                                   " snapshots, expected at most ",
                                                   kMaxListedSnapshots));
  }
  SnapshotReport report{.is_writing = proto.is_writing()};
  for (const v1::SnapshotId& id : proto.complete()) report.complete.push_back(IdOf(id));
  return report;
}

}  // namespace thalweg
