// JobSigner signs for a job: whoever has one knows the job's secret.
#pragma once

#include <string>

namespace thalweg {

// A JobSigner is thread-safe and never reveals the secret; server/identity/job_key.h implements it.
class JobSigner {
 public:
  virtual ~JobSigner() = default;
  // Returns the job's identity, with which anybody can check signatures.
  virtual const std::string& public_key() const = 0;
  // Returns the signature of `message`; an empty one, which proves nothing, if signing fails.
  virtual std::string Sign(const std::string& message) const = 0;
};

// Returns the identity of a job that may have no secret, and then none.
inline std::string IdentityOf(const JobSigner* signer) {
  return signer == nullptr ? std::string() : signer->public_key();
}

}  // namespace thalweg
