// HostPort is host:port as the options of the servers have it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace thalweg {

struct HostPort {
  std::string host;  // without the brackets of an IPv6 address
  int port = 0;
};

// Parses "host:port", "[v6]:port" or ":port", which means all IPv4 addresses. InvalidArgument names
// the error.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);

// Parses "host:port" as above, or "host:first-last", and returns an address for each port. A range
// has at most 65535 ports and does not begin with 0.
absl::StatusOr<std::vector<HostPort>> ParsePorts(const std::string& text);

// Parses addresses of other hosts, separated by commas, and returns each as it is written.
// InvalidArgument names one that no connection can be made to, or that is there twice.
absl::StatusOr<std::vector<std::string>> ParseTargets(const std::string& text);

// Formats the address; an IPv6 host gets its brackets.
std::string ToString(const HostPort& address);

}  // namespace thalweg
