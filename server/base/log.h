// This header sets up logging. Messages are written with spdlog's own functions (spdlog::info
// etc.).
#pragma once

#include <string>

#include "absl/status/status.h"

namespace thalweg {

// Sends log lines to stderr as "time level program: message", with THALWEG_LOG's level, and warns
// about unknown THALWEG_* variables. Call once, first in main.
void InitLogging(const std::string& program);

// Returns "UNAVAILABLE: text" without Abseil's decorations, for messages to people.
std::string Text(const absl::Status& status);

}  // namespace thalweg
