#include "server/sidecar/letters/letter.h"

#include <array>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

using Head = std::array<std::byte, kLetterHeadBytes>;

void Put(auto value, std::byte*& to) {
  for (size_t i = 0; i < sizeof(value); ++i) *to++ = static_cast<std::byte>(value >> (8 * i));
}

void Get(const std::byte*& from, auto& value) {
  value = 0;
  for (size_t i = 0; i < sizeof(value); ++i) {
    value |= static_cast<std::remove_reference_t<decltype(value)>>(*from++) << (8 * i);
  }
}

// Calls use(field) for each number, in the order of the wire.
void ForFields(auto& letter, auto&& use) {
  use(letter.group);
  use(letter.from);
  use(letter.to);
  use(letter.tag);
  use(letter.bytes);
  use(letter.message);
  use(letter.offset);
  use(letter.taken);
}

// What a sealed letter's payload refers to.
struct Sealed {
  Head head;
  std::shared_ptr<const void> body;
};

}  // namespace

Payload Seal(const Letter& letter, Payload body) {
  const auto sealed = std::make_shared<Sealed>();
  std::byte* to = sealed->head.data();
  Put(static_cast<uint32_t>(letter.kind), to);
  ForFields(letter, [&](auto value) { Put(value, to); });
  sealed->body = std::move(body.owner);
  Payload payload(sealed->head, sealed);
  payload.pieces.insert(payload.pieces.end(), body.pieces.begin(), body.pieces.end());
  return payload;
}

absl::StatusOr<OpenedLetter> OpenLetter(Payload sealed) {
  Head head;
  size_t got = 0;
  OpenedLetter opened;
  for (std::span<const std::byte> piece : sealed.pieces) {
    for (; got < head.size() && !piece.empty(); piece = piece.subspan(1)) head[got++] = piece[0];
    if (!piece.empty()) opened.body.pieces.push_back(piece);
  }
  const std::byte* from = head.data();
  uint32_t kind = 0;
  if (got == head.size()) Get(from, kind);
  if (kind < static_cast<uint32_t>(LetterKind::kOffer) ||
      kind > static_cast<uint32_t>(LetterKind::kReceipt)) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a letter, got ", got, " bytes of kind ", kind));
  }
  opened.letter.kind = static_cast<LetterKind>(kind);
  ForFields(opened.letter, [&](auto& value) { Get(from, value); });
  opened.body.owner = std::move(sealed.owner);
  return opened;
}

}  // namespace thalweg
