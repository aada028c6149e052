#include "server/net/address.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace thalweg {

absl::StatusOr<HostPort> ParseHostPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  HostPort address;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) ||
      address.port < 0 || address.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", text, "': expected host:port with a port from 0 to 65535"));
  }
  address.host = text.substr(0, colon);
  if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  } else if (address.host.find(':') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", text, "': an IPv6 host needs brackets, as in [::1]:7070"));
  }
  if (address.host.empty()) address.host = "0.0.0.0";
  return address;
}

std::string ToString(const HostPort& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? absl::StrCat("[", address.host, "]:", address.port)
            : absl::StrCat(address.host, ":", address.port);
}

}  // namespace thalweg
