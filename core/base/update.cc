#include "core/base/update.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

uint64_t NumGroups(const UpdateRule& rule) {
  if (rule.groups.empty()) return 0;
  return uint64_t{1} + *std::max_element(rule.groups.begin(), rule.groups.end());
}

bool IsDownFormat(WireFormat down) {
  const std::optional<LossyTraits> lossy = FindLossy(down);
  return lossy ? lossy->block_elems != 0
               : down == WireFormat::kFloat32 || down == WireFormat::kFloat16 ||
                     down == WireFormat::kBFloat16;
}

bool IsSame(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

std::string GraceOf(const UpdateRule& rule) {
  return absl::StrCat(rule.grace_ms == kMeasuredGrace
                          ? "a measured grace"
                          : absl::StrCat("a grace of ", rule.grace_ms, " ms"),
                      rule.drops_late ? ", late ones dropped" : "");
}

const char* NameOf(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::kSgd:
      return "sgd";
    case Optimizer::kAdam:
      return "adam";
    case Optimizer::kLamb:
      return "lamb";
  }
  return "unknown";
}

}  // namespace

bool GroupStep::operator==(const GroupStep& other) const {
  return lr == other.lr && weight_decay == other.weight_decay && momentum == other.momentum &&
         dampening == other.dampening && beta1 == other.beta1 && beta2 == other.beta2 &&
         eps == other.eps && IsSame(trust_ratio, other.trust_ratio);
}

bool UpdateStep::operator==(const UpdateStep& other) const {
  return groups == other.groups && grad_scale == other.grad_scale &&
         max_grad_norm == other.max_grad_norm && IsSame(grad_squares, other.grad_squares) &&
         measures == other.measures && waits_for_all == other.waits_for_all &&
         gives_nothing == other.gives_nothing;
}

ChunkPlan PlanOfUpdated(const BucketLayout& layout, WireFormat wire, uint64_t chunk_bytes,
                        uint32_t num_shards) {
  return ChunkPlan::For(layout.Elems(), layout.dtype, wire, chunk_bytes, num_shards)
      .AtGranules(layout, kUpdateGranule);
}

uint64_t GranulesIn(const BucketLayout& layout, uint64_t begin, uint64_t end) {
  uint64_t granules = 0;
  uint64_t first = 0;
  for (const TensorSpec& tensor : layout.tensors) {
    const uint64_t last = first + tensor.Elems();
    const uint64_t from = std::max(first, begin);
    const uint64_t to = std::min(last, end);
    if (from < to) granules += (to - from + kUpdateGranule - 1) / kUpdateGranule;
    first = last;
  }
  return granules;
}

absl::Status Validate(const UpdateRule& rule, const BucketLayout& layout) {
  const auto refused = [](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat("update: ", what...));
  };
  if (!IsValid(rule.optimizer)) {
    return refused("there is no optimizer ", static_cast<int>(rule.optimizer));
  }
  if (rule.decoupled && rule.optimizer == Optimizer::kSgd) {
    return refused("sgd has no decoupled weight decay");
  }
  if (rule.nesterov && rule.optimizer != Optimizer::kSgd) {
    return refused(NameOf(rule.optimizer), " has no Nesterov");
  }
  if (rule.optimizer == Optimizer::kLamb && !rule.commits) {
    return refused("lamb needs the norms of whole tensors: its update commits");
  }
  if (!IsDownFormat(rule.down)) {
    return refused("weights cross the network in floats of 16 or 32 bits, or in blocks, not in ",
                   IsValid(rule.down) ? Name(rule.down) : "an unknown format");
  }
  if (rule.sends_differences() && layout.dtype != DType::kFloat32) {
    return refused("weights in ", Name(layout.dtype), " do not come as differences in ",
                   Name(rule.down), ", which need fp32");
  }
  if (rule.sends_differences() && (rule.ahead > 0 || rule.has_own_rounds())) {
    return refused("differences in ", Name(rule.down), " need all nodes in the same round");
  }
  if (rule.ahead > kMaxAhead) {
    return refused("nodes can be at most ", kMaxAhead, " rounds apart, not ", rule.ahead);
  }
  if ((rule.ahead > 0) + rule.alone + rule.commits + (rule.quorum > 0) > 1) {
    return refused(
        "nodes wait for each other in one way: expected one of two rounds, some rounds "
        "apart, each by itself, or a quorum");
  }
  if (rule.quorum == 0 && (rule.grace_ms > 0 || rule.drops_late)) {
    return refused("only nodes that a quorum does not wait for are late");
  }
  if (rule.delay_aware && !rule.alone)
    return refused("nodes that wait for each other have no delays");
  if (rule.groups.size() != layout.tensors.size()) {
    return refused("expected groups of ", layout.tensors.size(), " tensors, got ",
                   rule.groups.size());
  }
  if (NumGroups(rule) > kMaxUpdateGroups) {
    return refused("at most ", kMaxUpdateGroups, " groups, got number ", NumGroups(rule) - 1);
  }
  return absl::OkStatus();
}

absl::Status Validate(const UpdateStep& step) {
  const auto refused = [](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat("update: ", what...));
  };
  if (step.groups.size() > kMaxUpdateGroups) {
    return refused("at most ", kMaxUpdateGroups, " groups have settings, got ", step.groups.size());
  }
  if (!(step.grad_scale > 0) || !std::isfinite(step.grad_scale) || !(step.max_grad_norm >= 0) ||
      step.grad_squares < 0) {
    return refused("gradients of scale ", step.grad_scale, " with squares ", step.grad_squares,
                   ", to be clipped to the norm ", step.max_grad_norm);
  }
  for (size_t i = 0; i < step.groups.size(); ++i) {
    const GroupStep& g = step.groups[i];
    for (const double value : {g.lr, g.weight_decay, g.momentum, g.dampening, g.eps}) {
      if (!std::isfinite(value)) return refused("group ", i, " has a setting of ", value);
    }
    if (g.lr < 0 || g.weight_decay < 0 || g.momentum < 0 || g.eps < 0 || g.trust_ratio < 0) {
      return refused("group ", i, " has a negative setting");
    }
    for (const double beta : {g.beta1, g.beta2}) {
      if (!(beta >= 0 && beta < 1)) {
        return refused("group ", i, ": expected betas from 0 to below 1, got ", beta);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFits(const UpdateStep& step, const UpdateRule& rule) {
  const auto refused = [](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat("update: ", what...));
  };
  if (step.groups.size() < NumGroups(rule)) {
    return refused("expected settings of ", NumGroups(rule), " groups, got ", step.groups.size());
  }
  if (step.measures && rule.optimizer != Optimizer::kLamb) {
    return refused(NameOf(rule.optimizer), " has nothing to measure");
  }
  if ((step.waits_for_all && rule.quorum == 0) || (step.gives_nothing && !step.waits_for_all)) {
    return refused(
        "only a round that waits for all, where others wait for a quorum, takes nothing");
  }
  if (!rule.nesterov) return absl::OkStatus();
  for (const uint32_t group : rule.groups) {
    const GroupStep& g = step.groups[group];
    if (g.momentum == 0 || g.dampening != 0) {
      return refused("group ", group, ": Nesterov needs a momentum and no dampening");
    }
  }
  return absl::OkStatus();
}

std::string ToString(const UpdateRule& rule) {
  const char* option = rule.decoupled ? " (decoupled)" : rule.nesterov ? " (nesterov)" : "";
  const char* rounds = rule.optimizer == Optimizer::kLamb ? ", in three rounds"
                       : rule.commits                     ? ", in two rounds"
                                                          : "";
  const uint32_t groups = NumGroups(rule);
  const std::string apart =
      rule.alone        ? ", each node by itself"
      : rule.ahead > 0  ? absl::StrCat(", nodes up to ", rule.ahead, " rounds apart")
      : rule.quorum > 0 ? absl::StrCat(", a quorum of ", rule.quorum, " nodes, ", GraceOf(rule))
                        : "";
  return absl::StrCat(NameOf(rule.optimizer), option, rounds, apart,
                      rule.delay_aware ? ", by staleness" : "", rule.maximize ? ", maximizing" : "",
                      ", weights in ", Name(rule.down), ", ", groups,
                      groups == 1 ? " group" : " groups");
}

}  // namespace thalweg
