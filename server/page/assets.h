// The files of the live page, as they lie beside this one; CMake builds them in.
#pragma once

#include <string_view>

namespace thalweg {

struct Asset {
  std::string_view name;  // "page.css"
  std::string_view bytes;
};

// Null when there is no such file. Valid for ever.
const Asset* FindAsset(std::string_view name);

}  // namespace thalweg
