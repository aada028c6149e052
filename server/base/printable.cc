#include "server/base/printable.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"

namespace thalweg {
namespace {

constexpr char kCut[] = "...";
constexpr size_t kCutBytes = sizeof(kCut) - 1;
// An error message quotes at most this much of a name.
constexpr size_t kMaxQuotedBytes = 100;

bool MovesOrReorders(char32_t character) {
  const auto is_in = [character](char32_t first, char32_t last) {
    return first <= character && character <= last;
  };
  return is_in(0, 0x1f) || is_in(0x7f, 0x9f) || is_in(0x200e, 0x200f) || is_in(0x2028, 0x202e) ||
         is_in(0x2066, 0x2069);
}

// Returns the length of the printable character that `text`, which is not empty, begins with, or 0
// if it begins with none.
size_t CharacterBytes(absl::string_view text) {
  const auto first = static_cast<uint8_t>(text[0]);
  // If a character has several bytes, the first begins with that many ones.
  const auto ones = static_cast<size_t>(std::countl_one(first));
  const size_t bytes = std::max<size_t>(ones, 1);
  if (ones == 1 || ones > 4 || bytes > text.size()) return 0;
  char32_t character = first & (0xff >> (ones + 1));
  for (const char next : text.substr(1, bytes - 1)) {
    const auto byte = static_cast<uint8_t>(next);
    if ((byte & 0xc0) != 0x80) return 0;
    character = (character << 6) | (byte & 0x3f);
  }
  // Each character has one encoding, the shortest; surrogates have none.
  constexpr char32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = 0xd800 <= character && character <= 0xdfff;
  if (character < kLeast[bytes] || character > 0x10ffff || is_surrogate) return 0;
  return MovesOrReorders(character) ? 0 : bytes;
}

std::string Escaped(char byte) {
  if (byte == '\n') return "\\n";
  if (byte == '\t') return "\\t";
  return absl::StrCat("\\x", absl::Hex(static_cast<uint8_t>(byte), absl::kZeroPad2));
}

}  // namespace

bool IsPrintable(absl::string_view text) {
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string Printable(absl::string_view text, size_t max_bytes) {
  std::string out;
  size_t kept = 0;  // how much of `out` leaves room for the mark of a cut
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const std::string next = bytes > 0 ? std::string(text.substr(0, bytes)) : Escaped(text[0]);
    if (out.size() + next.size() > max_bytes) {
      out.resize(kept);
      return out + kCut;
    }
    out += next;
    if (out.size() + kCutBytes <= max_bytes) kept = out.size();
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return out;
}

absl::Status CheckName(absl::string_view what, absl::string_view name) {
  if (!name.empty() && name.size() <= kMaxNameBytes && IsPrintable(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, " '", Printable(name, kMaxQuotedBytes), "' of ", name.size(), " bytes: expected 1 to ",
      kMaxNameBytes, " bytes of UTF-8 without control characters"));
}

}  // namespace thalweg
