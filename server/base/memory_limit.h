// This header tells how much memory a process may use.
#pragma once

#include <cstdint>
#include <string>

namespace thalweg {

// Returns the bytes of memory that this process may use: those of the machine, or of the tightest
// limit of its control groups (version 1 or 2), whichever is less. `root` is where /proc and /sys
// are looked for.
uint64_t MemoryLimit(const std::string& root = "");

}  // namespace thalweg
