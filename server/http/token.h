// This header checks the token that protects the HTTP port; the token is stored in a file.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace thalweg {

// Returns the token in `path` without surrounding white space, or InvalidArgument when there is
// none.
absl::StatusOr<std::string> ReadToken(const std::string& path);

// Returns whether an Authorization header carries the token: "Bearer TOKEN", or "Basic …" with the
// token as the password of any user. The time that the check takes reveals only the token's length.
bool HasToken(const std::string& authorization, const std::string& token);

}  // namespace thalweg
