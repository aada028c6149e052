// Tenants are what a shard's policy makes of the certificates of those who call it: who may take
// part in which jobs, and how much of the shard the jobs may use.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace thalweg {

// PeerNames are the names in the certificate that a caller has shown; none without TLS.
struct PeerNames {
  std::string spiffe_id = {};
  std::vector<std::string> dns_names = {};
  std::string common_name = {};

  // Returns the name by which to tell certificates apart, and which their renewal does not change:
  // the SPIFFE ID, otherwise "DNS:" and the first DNS name, otherwise "CN=" and the common name;
  // empty if there is none.
  std::string Principal() const;
};

// A pattern is a text that stands for itself, with one `*` at its beginning or end that stands for
// any text; `*` alone matches everything.
bool IsPattern(absl::string_view pattern);
bool MatchesPattern(absl::string_view pattern, absl::string_view text);

// A Tenant is whoever holds certificates of certain names. Everything but the name is patterns.
struct Tenant {
  std::string name = {};
  // A certificate is the tenant's if one of its names of one kind matches a pattern of that kind:
  // a CA that checks DNS names may let its clients choose common names.
  std::vector<std::string> spiffe_ids = {};
  std::vector<std::string> dns_names = {};  // compared without regard to case
  std::vector<std::string> common_names = {};
  std::vector<std::string> jobs = {};  // the names of jobs in which it may take part
  // What all its jobs on a shard together may use; nothing is bounded where there is no number.
  std::optional<uint32_t> max_jobs = {};
  std::optional<uint64_t> max_memory_bytes = {};

  bool Holds(const PeerNames& names) const;
  bool MayJoin(absl::string_view job) const;
};

// A Policy lists a shard's tenants. A certificate belongs to the first that holds it.
struct Policy {
  std::vector<Tenant> tenants = {};

  // Returns null if no tenant holds the certificate.
  const Tenant* Find(const PeerNames& names) const;
};

// Returns the policy of the moment, never null. It is called from several threads.
using PolicySource = std::function<std::shared_ptr<const Policy>()>;

}  // namespace thalweg
