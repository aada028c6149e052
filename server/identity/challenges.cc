#include "server/identity/challenges.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <array>
#include <cstring>
#include <random>

namespace thalweg {
namespace {

constexpr size_t kCodeBytes = 32;  // of HMAC-SHA256

std::string NewKey() {
  std::random_device device;
  std::array<std::random_device::result_type, kCodeBytes / sizeof(uint32_t)> words;
  for (auto& word : words) word = device();
  return {reinterpret_cast<const char*>(words.data()), sizeof(words)};
}

uint64_t Nanos(TimePoint time) { return static_cast<uint64_t>(ToNanos(time.time_since_epoch())); }

}  // namespace

Challenges::Challenges(Duration lifetime) : lifetime_(lifetime), key_(NewKey()) {}

std::string Challenges::Encode(const Body& body) const {
  static_assert(sizeof(Body) + kCodeBytes == kBytes);
  std::string text(kBytes, '\0');
  auto* bytes = reinterpret_cast<unsigned char*>(text.data());
  std::memcpy(bytes, &body, sizeof(Body));
  const bool done = HMAC(EVP_sha256(), key_.data(), static_cast<int>(key_.size()), bytes,
                         sizeof(Body), bytes + sizeof(Body), nullptr) != nullptr;
  return done ? text : "";  // Spend refuses an empty one
}

std::string Challenges::Draw(TimePoint now) {
  Body body{.expires = Nanos(now + lifetime_)};
  {
    MutexLock lock(mutex_);
    body.number = drawn_++;
  }
  return Encode(body);
}

absl::Status Challenges::Spend(const std::string& challenge, TimePoint now) {
  const auto refuse = [](const char* why) { return absl::PermissionDeniedError(why); };
  Body body;
  if (challenge.size() != kBytes) return refuse("the challenge is not one of this server's");
  std::memcpy(&body, challenge.data(), sizeof(Body));
  const std::string genuine = Encode(body);
  if (genuine.size() != kBytes || CRYPTO_memcmp(genuine.data(), challenge.data(), kBytes) != 0) {
    return refuse("the challenge is not one of this server's");
  }
  if (body.expires <= Nanos(now)) return refuse("the challenge has expired");
  MutexLock lock(mutex_);
  while (!spent_.empty() && spent_.begin()->first <= Nanos(now)) spent_.erase(spent_.begin());
  if (!spent_.emplace(body.expires, body.number).second) {
    return refuse("the challenge has been used before");
  }
  if (spent_.size() > kMaxSpent) spent_.erase(spent_.begin());
  return absl::OkStatus();
}

}  // namespace thalweg
