#include "server/sidecar/letters/open_calls.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

void OpenCalls::NoteProgress(const Id& id, TimePoint now) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  found->second.since = now;
  found->second.has_met = true;
}

std::string OpenCalls::WhatOf(const Id& id) const {
  const auto found = calls_.find(id);
  return found == calls_.end() ? "" : found->second.what;
}

absl::Status OpenCalls::NoteLeft(uint32_t local_rank, const std::string& name) {
  left_[local_rank] = name;
  for (const auto& [id, call] : calls_) THALWEG_RETURN_IF_ERROR(CheckAwaited(id));
  return absl::OkStatus();
}

absl::Status OpenCalls::CheckAwaited(const Id& id) const {
  const Call& call = calls_.at(id);
  const auto gone = call.awaited ? left_.find(*call.awaited) : left_.end();
  if (gone == left_.end() || left_.contains(id.first)) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat(gone->second, " has left, but the ", call.what, " waits for it"));
}

absl::Status OpenCalls::CheckLate(TimePoint now, TimePoint awake_since) const {
  for (const auto& [id, call] : calls_) {
    if (now - std::max(call.since, awake_since) <= call.timeout) continue;
    return absl::DeadlineExceededError(
        absl::StrCat(call.what,
                     call.has_met ? ": no further byte has come or gone within the timeout of "
                                  : ": the other side did not come within the timeout of ",
                     ToSeconds(call.timeout), " s"));
  }
  return absl::OkStatus();
}

}  // namespace thalweg
