// What the way to a shard carries, from the times of calls of chosen lengths.
#pragma once

#include <cstddef>
#include <functional>

#include "absl/status/statusor.h"
#include "core/base/exchange.h"

namespace thalweg {

// The most padding that a Probe call carries.
inline constexpr size_t kMaxProbeBytes = 4 << 20;

// How long a call with that many bytes of padding took.
using ProbeCall = std::function<absl::StatusOr<Duration>(size_t padding_bytes)>;

// The round trip is the shortest of a few empty calls. Then calls with twice as much padding each
// time show the rate, once one of them takes long enough to be measured.
//
// Links are shaped by token buckets, which let what they have saved up pass for free: a rate is
// only believed after kFreeBurstBytes have been spent. All that takes 60 to 80 ms on links from
// 100 Mbit/s to 1 Gbit/s, less beyond. Returns the first error of `call`.
absl::StatusOr<LinkSpeed> ProbeLink(const ProbeCall& call);

// Buckets up to this size do not falsify the rate.
inline constexpr size_t kFreeBurstBytes = 256 << 10;

}  // namespace thalweg
