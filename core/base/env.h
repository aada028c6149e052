// The C++ code reads the environment only here. client/python/thalweg/_settings/_variables.py is
// the counterpart in Python; a test keeps the two lists of names equal.
#pragma once

#include <string>
#include <vector>

namespace thalweg {

struct EnvVar {
  const char* name;
  const char* default_value;
  const char* help;
};

// Returns every THALWEG_* variable that any part of Thalweg reads.
const std::vector<EnvVar>& KnownEnvVars();

// Returns the value of a known variable, or its default when it is unset or empty.
std::string GetEnv(const char* name);

// Returns names in the environment that begin with THALWEG_ but are unknown and therefore probably
// misspelt.
std::vector<std::string> UnknownEnvVars();

}  // namespace thalweg
