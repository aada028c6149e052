// This header reads the text of a policy, whose format proto/thalweg/v1/policy.proto describes.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "core/base/tenant.h"

namespace thalweg {

// InvalidArgument says what is wrong with the text and where: "PATH:LINE:COLUMN: …".
absl::StatusOr<Policy> ParsePolicy(const std::string& text, const std::string& path);

}  // namespace thalweg
