// What the two server programs share: signals, the ready line, and options that only print.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "core/base/clock.h"

namespace thalweg {

// Blocks SIGTERM and SIGINT in this thread and those it starts, so that Signals::Wait sees them.
// First thing in main, before any thread.
class Signals {
 public:
  Signals();
  // True when a signal has come, after at most `patience`.
  bool Wait(Duration patience);
};

// Adds --version and --list-env (a JSON object name → default, of every THALWEG_* variable).
void AddCommonOptions(CLI::App& app, int* ready_fd);

// Writes one JSON line {"address": …, "http": …} to `fd`, if that is not negative, and closes it:
// whoever started this process knows now that it serves, and where.
void AnnounceReady(int fd, const std::string& address, const std::string& http);

}  // namespace thalweg
