// Challenges are what a server asks callers to sign, so that a proof counts for one call only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"

namespace thalweg {

// Challenges is thread-safe. It recognises its challenges by a code that only it can compute, and
// remembers nothing until one is spent: strangers who ask for many cannot displace anybody's.
class Challenges {
 public:
  static constexpr size_t kBytes = 48;
  // This many spent challenges are remembered; beyond it, the next to expire may be spent again.
  static constexpr size_t kMaxSpent = 1 << 16;

  // A challenge can be spent for `lifetime` after it was drawn.
  explicit Challenges(Duration lifetime);

  // Returns a new challenge: kBytes that nobody can predict.
  std::string Draw(TimePoint now);
  // Spends a challenge. PermissionDenied if it is not one of this object's, has expired, or has
  // been spent.
  absl::Status Spend(const std::string& challenge, TimePoint now);

 private:
  // A Body is the part of a challenge that says something; the code follows it.
  struct Body {
    uint64_t expires = 0;  // nanoseconds of the steady clock
    uint64_t number = 0;   // counts challenges
  };

  std::string Encode(const Body& body) const;

  const Duration lifetime_;
  const std::string key_;

  Mutex mutex_;
  uint64_t drawn_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::pair<uint64_t, uint64_t>> spent_ ABSL_GUARDED_BY(mutex_);  // next to expire first
};

}  // namespace thalweg
