#include "server/http/token.h"

#include <openssl/crypto.h>

#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/text_file.h"

namespace thalweg {
namespace {

constexpr absl::string_view kBearer = "Bearer ";
constexpr absl::string_view kBasic = "Basic ";

bool Same(absl::string_view given, const std::string& token) {
  return given.size() == token.size() &&
         CRYPTO_memcmp(given.data(), token.data(), token.size()) == 0;
}

}  // namespace

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  const std::optional<std::string> text = ReadTextFile(path);
  std::string token(absl::StripAsciiWhitespace(text.value_or("")));
  if (!token.empty()) return token;
  return absl::InvalidArgumentError(
      absl::StrCat("'", path, "': expected a token, ", text ? "got none" : "cannot read it"));
}

bool HasToken(const std::string& authorization, const std::string& token) {
  // The names of authentication schemes are case-insensitive (RFC 9110, 11.1).
  if (absl::StartsWithIgnoreCase(authorization, kBearer)) {
    return Same(absl::string_view(authorization).substr(kBearer.size()), token);
  }
  std::string credentials;
  if (!absl::StartsWithIgnoreCase(authorization, kBasic) ||
      !absl::Base64Unescape(absl::string_view(authorization).substr(kBasic.size()), &credentials)) {
    return false;
  }
  const size_t colon = credentials.find(':');
  return colon != std::string::npos &&
         Same(absl::string_view(credentials).substr(colon + 1), token);
}

}  // namespace thalweg
