#include "server/net/address.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/status_macros.h"

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

absl::StatusOr<std::vector<std::string>> ParseTargets(const std::string& text) {
  std::vector<std::string> targets;
  for (const absl::string_view piece : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::string target(absl::StripAsciiWhitespace(piece));
    if (absl::StrContains(target, "//")) {
      return absl::InvalidArgumentError(
          absl::StrCat("address '", target, "': expected host:port, without a scheme"));
    }
    THALWEG_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(target));
    if (address.port == 0 || absl::StartsWith(target, ":")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "address '", target, "': expected the host and port of a server, which is not port 0"));
    }
    if (std::find(targets.begin(), targets.end(), target) != targets.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("address '", target, "' is there twice, expected each server once"));
    }
    targets.push_back(target);
  }
  return targets;
}

absl::StatusOr<std::vector<HostPort>> ParsePorts(const std::string& text) {
  const size_t colon = text.rfind(':');
  const size_t dash = colon == std::string::npos ? colon : text.find('-', colon);
  THALWEG_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(text.substr(0, dash)));
  std::vector<HostPort> addresses = {address};
  if (dash == std::string::npos) return addresses;
  THALWEG_ASSIGN_OR_RETURN(const HostPort last,
                           ParseHostPort(absl::StrCat(":", text.substr(dash + 1))));
  if (address.port == 0 || last.port < address.port) {
    return absl::InvalidArgumentError(absl::StrCat(
        "address '", text, "': expected host:first-last with ports from 1 in ascending order"));
  }
  while (address.port < last.port) {
    ++address.port;
    addresses.push_back(address);
  }
  return addresses;
}

std::string ToString(const HostPort& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? absl::StrCat("[", address.host, "]:", address.port)
            : absl::StrCat(address.host, ":", address.port);
}

}  // namespace thalweg
