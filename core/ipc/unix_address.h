// This header makes the address of a Unix socket with a name in the file system.
#pragma once

#include <sys/un.h>

#include <string>

#include "absl/status/statusor.h"

namespace thalweg {

// Returns InvalidArgument when `path` is empty, contains a zero byte or is longer than the 107
// bytes that fit.
absl::StatusOr<sockaddr_un> UnixAddress(const std::string& path);

}  // namespace thalweg
