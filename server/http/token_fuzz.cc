// Authorization headers: none but the token's own admit anybody. The first byte is the length of
// the token, and the rest is the header.

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/fuzzing.h"
#include "server/http/token.h"

namespace thalweg {
namespace {

void Run(FuzzInput input) {
  const std::string token = "x" + input.Text(input.Byte());
  const std::string header = input.Text(1 << 16);
  Promise(HasToken("Bearer " + token, token), "a token admits who has it");
  const std::string user = header.substr(0, header.find(':'));
  Promise(HasToken("Basic " + absl::Base64Escape(absl::StrCat(user, ":", token)), token),
          "any user has the token as a password");
  if (!HasToken(header, token)) return;
  std::string said = header.substr(std::string("Basic ").size());
  if (absl::StartsWithIgnoreCase(header, "Basic ")) {
    std::string decoded;
    Promise(absl::Base64Unescape(said, &decoded), "credentials are in Base64");
    said = decoded;
  }
  Promise(absl::EndsWith(said, token), "a header that admits ends with the token");
}

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thalweg::Run(thalweg::FuzzInput(data, size));
  return 0;
}
