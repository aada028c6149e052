// What writers and readers of messages have in common: which fields structures in them have.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "core/base/update.h"
#include "core/ipc/message.h"

namespace thalweg::ipc {

template <typename T>
concept Integer = (std::unsigned_integral<T> && !std::same_as<T, bool>) || std::same_as<T, int64_t>;

// M is T, const when it is written.
template <typename M, typename T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

template <typename Archive, typename... Values>
void All(Archive& archive, Values&... fields) {
  (archive.Field(fields), ...);
}

// Fields lists the fields of what is in messages once for both directions, as Visit below does for
// the messages.
void Fields(auto& archive, Is<UpdateRule> auto& rule) {
  All(archive, rule.optimizer, rule.decoupled, rule.nesterov, rule.maximize, rule.commits,
      rule.groups, rule.down, rule.ahead, rule.alone, rule.delay_aware, rule.quorum, rule.grace_ms,
      rule.drops_late);
}
void Fields(auto& archive, Is<GroupStep> auto& step) {
  All(archive, step.lr, step.weight_decay, step.momentum, step.dampening, step.beta1, step.beta2,
      step.eps, step.trust_ratio);
}
void Fields(auto& archive, Is<JobTerms> auto& terms) {
  All(archive, terms.epochs, terms.window_chunks, terms.shares, terms.measured);
}

}  // namespace thalweg::ipc
