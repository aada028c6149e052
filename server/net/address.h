// host:port, as in the options of the servers.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace thalweg {

struct HostPort {
  std::string host;  // without the brackets of an IPv6 address
  int port = 0;
};

// Accepts "host:port", "[v6]:port" and ":port", which means all IPv4 addresses. InvalidArgument
// names what is wrong.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);

// The opposite; an IPv6 host gets its brackets.
std::string ToString(const HostPort& address);

}  // namespace thalweg
