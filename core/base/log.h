// Logging set-up. Messages are written with spdlog's own functions (spdlog::info and so on).
#pragma once

#include <string>

#include "absl/status/status.h"

namespace thalweg {

// Sends log lines to stderr as "time level program: message", with THALWEG_LOG's level, and warns
// about unknown THALWEG_* variables. Call once, first thing in main.
void InitLogging(const std::string& program);

// "UNAVAILABLE: text" without Abseil's decorations, for messages that people read.
std::string Text(const absl::Status& status);

}  // namespace thalweg
