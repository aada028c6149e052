// The one place of the C++ code that reads the environment. client/python/thalweg/_config.py is its
// counterpart in Python; a test keeps the two lists of names equal.
#pragma once

#include <string>
#include <vector>

namespace thalweg {

struct EnvVar {
  const char* name;
  const char* default_value;
  const char* help;
};

// Every THALWEG_* variable that any part of Thalweg understands.
const std::vector<EnvVar>& KnownEnvVars();

// The value of a known variable, or its default when unset or empty.
std::string GetEnv(const char* name);

// Names in the environment that begin with THALWEG_ but are not known: most likely misspelt.
std::vector<std::string> UnknownEnvVars();

}  // namespace thalweg
