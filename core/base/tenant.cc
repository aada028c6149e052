#include "core/base/tenant.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

bool MatchesAny(const std::vector<std::string>& patterns, absl::string_view text) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [text](const std::string& pattern) { return MatchesPattern(pattern, text); });
}

bool IsDnsNameOfAny(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&name](const std::string& pattern) {
    return MatchesPattern(absl::AsciiStrToLower(pattern), absl::AsciiStrToLower(name));
  });
}

}  // namespace

std::string PeerNames::Principal() const {
  if (!spiffe_id.empty()) return spiffe_id;
  if (!dns_names.empty()) return absl::StrCat("DNS:", dns_names.front());
  return common_name.empty() ? "" : absl::StrCat("CN=", common_name);
}

bool IsPattern(absl::string_view pattern) {
  const auto stars = std::count(pattern.begin(), pattern.end(), '*');
  if (pattern.empty() || stars > 1) return false;
  return stars == 0 || pattern.front() == '*' || pattern.back() == '*';
}

bool MatchesPattern(absl::string_view pattern, absl::string_view text) {
  if (absl::EndsWith(pattern, "*"))
    return absl::StartsWith(text, pattern.substr(0, pattern.size() - 1));
  if (absl::StartsWith(pattern, "*")) return absl::EndsWith(text, pattern.substr(1));
  return text == pattern;
}

bool Tenant::Holds(const PeerNames& names) const {
  // A name that the certificate lacks is no name, also where a pattern matches the empty text.
  if (!names.spiffe_id.empty() && MatchesAny(spiffe_ids, names.spiffe_id)) return true;
  if (!names.common_name.empty() && MatchesAny(common_names, names.common_name)) return true;
  return std::any_of(names.dns_names.begin(), names.dns_names.end(),
                     [this](const std::string& name) { return IsDnsNameOfAny(dns_names, name); });
}

bool Tenant::MayJoin(absl::string_view job) const { return MatchesAny(jobs, job); }

const Tenant* Policy::Find(const PeerNames& names) const {
  const auto found = std::find_if(tenants.begin(), tenants.end(),
                                  [&names](const Tenant& tenant) { return tenant.Holds(names); });
  return found == tenants.end() ? nullptr : &*found;
}

}  // namespace thalweg
