// Losses in a JoinRequest and a JoinResponse, which have the same fields for them.
#pragma once

#include <chrono>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/exchange/join.h"

namespace thalweg {

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

}  // namespace thalweg
