// Reads whole files that may be missing, unreadable or folders.
#pragma once

#include <optional>
#include <string>

namespace thalweg {

// Returns what a file has; nothing: it cannot be read. The library's streams throw for a folder.
std::optional<std::string> ReadTextFile(const std::string& path);

}  // namespace thalweg
