#include "client/core/reconnect.h"

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/env.h"

namespace thalweg {

absl::StatusOr<Duration> ReconnectFromEnv() {
  const std::string text = GetEnv("THALWEG_RECONNECT");
  double seconds = 0;
  if (absl::SimpleAtod(text, &seconds) && seconds >= 0 && seconds <= 3600) {
    return FromSeconds(seconds);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("THALWEG_RECONNECT is '", text, "', expected seconds from 0 to 3600"));
}

}  // namespace thalweg
