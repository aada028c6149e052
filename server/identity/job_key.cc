#include "server/identity/job_key.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/free_with.h"

namespace thalweg {
namespace {

using Context = std::unique_ptr<EVP_MD_CTX, FreeWith<EVP_MD_CTX_free>>;
using PublicKey = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;

const unsigned char* Bytes(const std::string& text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}
unsigned char* Bytes(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

bool IsHex(const std::string& text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
}

}  // namespace

void JobKey::FreeKey::operator()(evp_pkey_st* key) const { EVP_PKEY_free(key); }

absl::StatusOr<std::shared_ptr<const JobKey>> JobKey::FromHex(const std::string& secret) {
  if (secret.size() != 2 * kSecretBytes || !IsHex(secret)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a job's secret must have ", 2 * kSecretBytes, " hexadecimal digits, got ", secret.size(),
        IsHex(secret) ? " of them" : " characters, some of which are no such digits"));
  }
  std::string seed = absl::HexStringToBytes(secret);
  KeyPair pair(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, Bytes(std::as_const(seed)),
                                            seed.size()));
  OPENSSL_cleanse(seed.data(), seed.size());
  std::string public_key(kPublicKeyBytes, '\0');
  size_t size = public_key.size();
  if (pair == nullptr || EVP_PKEY_get_raw_public_key(pair.get(), Bytes(public_key), &size) != 1) {
    ERR_clear_error();
    return absl::InternalError("OpenSSL makes no Ed25519 key of the job's secret");
  }
  return std::shared_ptr<const JobKey>(new JobKey(std::move(pair), std::move(public_key)));
}

std::string JobKey::Sign(const std::string& message) const {
  const Context context(EVP_MD_CTX_new());
  std::string signature(kSignatureBytes, '\0');
  size_t size = signature.size();
  const bool done =
      context != nullptr &&
      EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, pair_.get()) == 1 &&
      EVP_DigestSign(context.get(), Bytes(signature), &size, Bytes(message), message.size()) == 1;
  ERR_clear_error();
  return done ? signature : "";
}

bool Verify(const std::string& public_key, const std::string& message,
            const std::string& signature) {
  if (public_key.size() != kPublicKeyBytes || signature.size() != kSignatureBytes) return false;
  const PublicKey key(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, Bytes(public_key), public_key.size()));
  const Context context(EVP_MD_CTX_new());
  const bool valid =
      key != nullptr && context != nullptr &&
      EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
      EVP_DigestVerify(context.get(), Bytes(signature), signature.size(), Bytes(message),
                       message.size()) == 1;
  ERR_clear_error();
  return valid;
}

}  // namespace thalweg
