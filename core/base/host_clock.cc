#include "core/base/host_clock.h"

#include <unistd.h>

#include <fstream>

namespace thalweg {
namespace {

std::string NameClock() {
  std::string name;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> name;
  if (!name.empty()) return name;
  char host[256] = {};
  return gethostname(host, sizeof host - 1) == 0 ? host : "";
}

}  // namespace

ClockReading ReadClock() {
  static const auto* const name = new std::string(NameClock());
  return {*name, ToNanos(Now().time_since_epoch())};
}

ClockOffset OffsetOf(const ClockReading& theirs, TimePoint asked, TimePoint answered) {
  const int64_t half = ToNanos(answered - asked) / 2;
  const int64_t middle = ToNanos(asked.time_since_epoch()) + half;
  return {theirs.clock, middle, theirs.nanos - middle, half + 1};
}

}  // namespace thalweg
