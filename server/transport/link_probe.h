// This header estimates the speed of the link to a shard from the times of calls of chosen lengths.
#pragma once

#include <cstddef>
#include <functional>

#include "absl/status/statusor.h"
#include "core/exchange/link_speed.h"

namespace thalweg {

// A Probe call carries at most this much padding.
inline constexpr size_t kMaxProbeBytes = 4 << 20;

// A ProbeCall makes a call with that many bytes of padding and returns the time it took.
using ProbeCall = std::function<absl::StatusOr<Duration>(size_t padding_bytes)>;

// Measures the link. The round trip is the shortest of a few empty calls. Calls whose padding
// doubles each time then show the rate, as soon as one takes long enough to be measured: the median
// of five such calls counts.
//
// Links are often shaped by token buckets, which let saved-up tokens pass at once: ProbeLink trusts
// a rate only after it has sent kFreeBurstBytes. A probe takes 140 to 250 ms on links from 100
// Mbit/s to 1 Gbit/s, and less on faster ones. Returns the first error of `call`.
absl::StatusOr<LinkSpeed> ProbeLink(const ProbeCall& call);

// Token buckets up to this size do not distort the measured rate.
inline constexpr size_t kFreeBurstBytes = 256 << 10;

}  // namespace thalweg
