#include "core/ipc/unix_address.h"

#include <sys/socket.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace thalweg {

absl::StatusOr<sockaddr_un> UnixAddress(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  constexpr size_t kLongest = sizeof address.sun_path - 1;
  if (path.size() > kLongest) {
    return absl::InvalidArgumentError(absl::StrCat("socket path '", path, "' has ", path.size(),
                                                   " bytes, at most ", kLongest,
                                                   " are possible: choose a shorter folder"));
  }
  if (path.empty() || path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError("socket path is empty or has a zero byte in it");
  }
  path.copy(address.sun_path, path.size());
  return address;
}

}  // namespace thalweg
