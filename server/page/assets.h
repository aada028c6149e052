// Assets are the files of the live page. They lie in this folder; CMake embeds them.
#pragma once

#include <string_view>

namespace thalweg {

struct Asset {
  std::string_view name;  // "page.css"
  std::string_view bytes;
};

// Returns the asset, or null when there is no such file. The pointer is always valid.
const Asset* FindAsset(std::string_view name);

}  // namespace thalweg
