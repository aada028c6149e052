// This header makes contributions of one float32 for tests of rounds.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "core/exchange/rounds.h"
#include "server/round/fold.h"

namespace thalweg {

inline Payload PayloadOf(float value) {
  const auto buffer = std::make_shared<float>(value);
  return Payload(std::as_bytes(std::span(buffer.get(), 1)), buffer);
}

inline float ValueOf(const Payload& payload) {
  float value;
  std::memcpy(&value, payload.pieces[0].data(), sizeof value);
  return value;
}

inline Contribution Share(const RoundId& id, float value, uint64_t epoch = 1) {
  return {id, epoch, WireFormat::kFloat32, 1, PayloadOf(value)};
}

// Returns a contribution to a round of this group and collective.
inline Contribution ShareOf(const RoundId& id, const Collective& collective, float value,
                            uint32_t group = 0) {
  Contribution share = Share(id, value);
  share.group = group;
  share.collective = collective;
  return share;
}

// Returns the contribution of a node from which the collective takes nothing.
inline Contribution Ready(const RoundId& id, const Collective& collective, uint32_t group = 0) {
  Contribution ready = ShareOf(id, collective, 0, group);
  ready.payload = Payload();
  return ready;
}

// Folds a round of one element and returns its result.
inline float ResultOf(const CompleteRound& round) {
  const auto result = FoldRound(round, 1, nullptr);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? ValueOf(result->payload) : 0;
}

}  // namespace thalweg
