// Completed and Asked say what a shard has to do: with a round, and for a node that does not wait
// for one.
#pragma once

#include <cstdint>
#include <memory>

#include "core/base/clock.h"
#include "core/exchange/rounds.h"
#include "server/round/chunk_states.h"
#include "server/round/complete_round.h"
#include "server/round/layout_registry.h"
#include "server/round/update.h"

namespace thalweg {

// A Completed is a complete round with the state of its chunk, if it has one, and how that is
// updated.
struct Completed {
  CompleteRound round;
  std::shared_ptr<ChunkState> state;
  LayoutRegistry::Update update = {};
  std::shared_ptr<const UpdateStep> step = nullptr;  // null: the round does no update
  double raw_bytes = 0;
  uint32_t last_node = 0;          // the node whose contribution completed it
  TimePoint at;                    // when that contribution arrived
  bool has_lost_residual = false;  // with what the shard had kept before it was restarted
};

// An Asked is a node's round whose result does not wait for all other nodes.
struct Asked {
  Versions::Ask ask;
  RoundResult contributed;  // its number and size
  std::shared_ptr<const UpdateRule> rule;
  std::shared_ptr<ChunkState> state;
  double raw_bytes = 0;
};

}  // namespace thalweg
