#include "server/sidecar/letters/correspondence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

std::optional<Correspondence::Outgoing> Correspondence::Next() {
  const bool may_go = written_ - confirmed_ < window_;
  auto& queue = requests_.empty() ? waiting_ : requests_;
  if (!queue.empty() && may_go) {
    OpenedLetter next = std::move(queue.front());
    queue.pop_front();
    next.letter.taken = told_ = taken_;
    return Outgoing{++written_, Seal(next.letter, std::move(next.body))};
  }
  const bool asks = settles_ && asked_ < written_ && (gives_up_ || confirmed_ < written_);
  const uint64_t untold = taken_ - told_;
  const bool tells = owes_answer_ || untold >= (tells_at_once_ ? 1 : (window_ + 1) / 2);
  if (!asks && !tells) return std::nullopt;
  told_ = taken_;
  owes_answer_ = false;
  if (asks) asked_ = written_;
  const uint64_t asked = asks ? (gives_up_ ? kGivesUp : kAsks) : 0;
  return Outgoing{0, Seal({.kind = LetterKind::kReceipt, .message = asked, .taken = taken_}, {})};
}

absl::StatusOr<std::vector<OpenedLetter>> Correspondence::Take(uint64_t number, Payload sealed) {
  THALWEG_ASSIGN_OR_RETURN(OpenedLetter opened, OpenLetter(std::move(sealed)));
  const Letter& letter = opened.letter;
  const bool is_receipt = letter.kind == LetterKind::kReceipt;
  const bool is_known = !is_receipt && (number <= taken_ || early_.contains(number));
  if (letter.taken > written_ || is_receipt != (number == 0) || is_known ||
      number > taken_ + window_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "letter ", number, " after ", taken_, " with a window of ", window_, " confirms ",
        letter.taken, " of ", written_, is_known ? ", and has come before" : ""));
  }
  confirmed_ = std::max(confirmed_, letter.taken);
  std::vector<OpenedLetter> in_order;
  if (is_receipt) {
    tells_at_once_ = tells_at_once_ || letter.message > 0;
    if (letter.message == kGivesUp) owes_answer_ = other_has_given_up_ = true;
    is_answered_ = asked_ > 0;
    return in_order;
  }
  early_.emplace(number, std::move(opened));
  while (!early_.empty() && early_.begin()->first == taken_ + 1) {
    in_order.push_back(std::move(early_.begin()->second));
    early_.erase(early_.begin());
    ++taken_;
  }
  return in_order;
}

}  // namespace thalweg
