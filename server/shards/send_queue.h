// SendQueue holds the chunks of one part that wait for their turn to go to one shard.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "core/base/clock.h"
#include "core/exchange/rounds.h"
#include "server/base/metrics.h"

namespace thalweg {

// Thread-compatible. Chunks leave in the order in which they came. The shard may owe a window of
// results; the chunks that come meanwhile wait, in the memory that they have been encoded in.
class SendQueue {
 public:
  // `wait_seconds` counts how long chunks have waited for a place; it must outlive the queue.
  explicit SendQueue(Counter& wait_seconds) : wait_seconds_(wait_seconds) {}

  // Adds a chunk; `place` is larger than those before. Returns whether the caller must send: it
  // calls Next, and passes on what that returns, until that returns nothing. Otherwise another
  // caller is about to call Next.
  [[nodiscard]] bool Push(Contribution contribution, double place);
  // The shard has answered one chunk. The result is that of Push.
  [[nodiscard]] bool NoteAnswered();
  // Returns the next chunk to send, while the shard owes fewer than `window` results.
  std::optional<Contribution> Next(uint32_t window, TimePoint now);
  // Returns what has not been sent and never will be; the caller releases it without locks.
  std::deque<Contribution> Close();

  // Returns how many chunks have been sent and are not answered.
  uint32_t owed() const { return static_cast<uint32_t>(places_.size() - waiting_.size()); }
  // Return the places of the oldest chunk that is not answered, and of the next one to send.
  std::optional<double> oldest() const;
  std::optional<double> next() const;

 private:
  bool BeginSending();

  Counter& wait_seconds_;
  std::deque<Contribution> waiting_;
  std::deque<double> places_;            // of the chunks owed, then of those that wait
  bool is_sending_ = false;              // some caller has been told to send
  std::optional<TimePoint> full_since_;  // set while chunks wait for a place
};

}  // namespace thalweg
