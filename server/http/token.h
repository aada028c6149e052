// Who may read the HTTP port: whoever knows the token that lies in a file.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace thalweg {

// The token in `path`, without white space around it. InvalidArgument when there is none.
absl::StatusOr<std::string> ReadToken(const std::string& path);

// Whether an Authorization header has the token: "Bearer TOKEN", or "Basic …" with it as the
// password of any user. How long this takes says nothing of the token but its length.
bool HasToken(const std::string& authorization, const std::string& token);

}  // namespace thalweg
