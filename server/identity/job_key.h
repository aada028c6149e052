// JobKey is a job's secret as a key: it signs what only the job's nodes may say.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "core/base/job_signer.h"

struct evp_pkey_st;  // OpenSSL's EVP_PKEY

namespace thalweg {

inline constexpr size_t kSecretBytes = 32;
inline constexpr size_t kPublicKeyBytes = 32;
inline constexpr size_t kSignatureBytes = 64;

// A JobKey is the Ed25519 key pair (RFC 8032) whose seed is the secret.
class JobKey final : public JobSigner {
 public:
  // Takes the secret as 64 hexadecimal digits. InvalidArgument says how it is malformed without
  // repeating any of it.
  static absl::StatusOr<std::shared_ptr<const JobKey>> FromHex(const std::string& secret);

  const std::string& public_key() const override { return public_key_; }
  std::string Sign(const std::string& message) const override;

 private:
  struct FreeKey {
    void operator()(evp_pkey_st* key) const;
  };
  using KeyPair = std::unique_ptr<evp_pkey_st, FreeKey>;

  JobKey(KeyPair pair, std::string public_key)
      : pair_(std::move(pair)), public_key_(std::move(public_key)) {}

  const KeyPair pair_;
  const std::string public_key_;
};

// Returns whether `signature` is that of `message` by the owner of `public_key`. Keys and
// signatures may be any bytes of any length.
bool Verify(const std::string& public_key, const std::string& message,
            const std::string& signature);

}  // namespace thalweg
