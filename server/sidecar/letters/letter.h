// A Letter is what one node says to one other, for its workers: core/exchange/rounds.h takes it
// there.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/payload.h"

namespace thalweg {

enum class LetterKind : uint32_t {
  kOffer = 1,    // a worker sends a message; a short one is the letter's body
  kRequest = 2,  // the receiver has come: from `message` it wants the bytes up to `offset`
  kBody = 3,     // bytes of `message`, from `offset` on
  kReceipt = 4,  // says nothing but `taken`, and perhaps one of these as `message`
};
inline constexpr uint64_t kAsks = 1;     // confirm at once what you take, from now on
inline constexpr uint64_t kGivesUp = 2;  // and know that this node leaves: answer, and no more

// Numbers of messages count what one node's workers send to the other node's, from 1.
struct Letter {
  LetterKind kind = LetterKind::kReceipt;
  uint32_t group = 0;  // this and the next four are those of an offer
  uint32_t from = 0;   // rank in the group
  uint32_t to = 0;     // rank in the group
  uint64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t message = 0;
  uint64_t offset = 0;  // in a request or body
  uint64_t taken = 0;   // how many letters the writer has taken from the reader

  bool operator==(const Letter&) const = default;
};

// Returns the letter's bytes, little-endian in the order of the fields, and then the body.
Payload Seal(const Letter& letter, Payload body);

struct OpenedLetter {
  Letter letter;
  Payload body;
};
// InvalidArgument: it is no letter.
absl::StatusOr<OpenedLetter> OpenLetter(Payload sealed);

inline constexpr uint64_t kLetterHeadBytes = 56;

}  // namespace thalweg
