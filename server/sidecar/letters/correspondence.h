// A Correspondence is the letters between this node and one other.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/payload.h"
#include "server/sidecar/letters/letter.h"

namespace thalweg {

// Letters are taken in the order in which they go, whichever way each of them comes. Requests go
// before what has been written earlier and still waits: behind its bytes, the other node's link
// would rest meanwhile. No more are on the way than the window. Thread-compatible.
class Correspondence {
 public:
  explicit Correspondence(uint32_t window) : window_(window) {}

  void Write(const Letter& letter, Payload body) {
    auto& queue = letter.kind == LetterKind::kRequest ? requests_ : waiting_;
    queue.push_back({letter, std::move(body)});
  }

  // From now on each end confirms at once what it takes: this node waits for it. `gives_up`: and
  // leaves, whatever the other one has still to say of messages that nobody has received there.
  void Settle(bool gives_up) {
    settles_ = tells_at_once_ = true;
    gives_up_ = gives_up;
  }
  // Returns whether all that was written has gone, and the other node has taken it, and knows if
  // this one gives up.
  bool is_settled() const {
    return requests_.empty() && waiting_.empty() && confirmed_ == written_ &&
           (!gives_up_ || is_answered_);
  }
  bool other_has_given_up() const { return other_has_given_up_; }

  struct Outgoing {
    uint64_t number = 0;  // from 1; 0: a receipt, which has none
    Payload sealed;
  };
  // Returns the next letter that goes now, if any.
  std::optional<Outgoing> Next();

  // Takes a letter that has come, and returns those that are to be read now. InvalidArgument: it is
  // no letter, has come before, or cannot have been on the way.
  absl::StatusOr<std::vector<OpenedLetter>> Take(uint64_t number, Payload sealed);

 private:
  const uint32_t window_;
  std::deque<OpenedLetter> requests_;
  std::deque<OpenedLetter> waiting_;  // others
  uint64_t written_ = 0;              // number of the last letter that has gone
  uint64_t confirmed_ = 0;            // number of the last one that the other node has taken
  uint64_t taken_ = 0;                // number of the other node's last letter that has been read
  uint64_t told_ = 0;                 // the same, as the other node knows it
  std::map<uint64_t, OpenedLetter> early_;  // by number
  bool settles_ = false;
  bool tells_at_once_ = false;
  bool gives_up_ = false;
  bool is_answered_ = false;  // since the other node was asked
  bool other_has_given_up_ = false;
  bool owes_answer_ = false;
  uint64_t asked_ = 0;  // `written_` when the other node was asked to confirm it
};

}  // namespace thalweg
