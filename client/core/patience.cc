#include "client/core/patience.h"

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/env.h"

namespace thalweg {
namespace {

absl::StatusOr<Duration> SecondsFromEnv(const char* name) {
  const std::string text = GetEnv(name);
  double seconds = 0;
  if (absl::SimpleAtod(text, &seconds) && seconds >= 0 && seconds <= 3600) {
    return FromSeconds(seconds);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is '", text, "', expected seconds from 0 to 3600"));
}

}  // namespace

absl::StatusOr<Duration> ReconnectFromEnv() { return SecondsFromEnv("THALWEG_RECONNECT"); }
absl::StatusOr<Duration> LossGraceFromEnv() { return SecondsFromEnv("THALWEG_LOSS_GRACE"); }

}  // namespace thalweg
