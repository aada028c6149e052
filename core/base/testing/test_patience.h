// For tests: how long they wait for what must come.
#pragma once

#include <chrono>

#include "core/base/clock.h"

namespace thalweg {

inline constexpr Duration kTestPatience = std::chrono::seconds(60);  // far beyond what is needed

}  // namespace thalweg
