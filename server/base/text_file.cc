#include "server/base/text_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>

namespace thalweg {

std::optional<std::string> ReadTextFile(const std::string& path) {
  std::error_code ignored;
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open() || std::filesystem::is_directory(path, ignored)) return std::nullopt;
  return std::string{std::istreambuf_iterator<char>(file), {}};
}

}  // namespace thalweg
