// GradientPath says how a worker's gradients reach its node's sidecar, and how results return. The
// numeric values are part of the ipc format: never renumber.
#pragma once

#include <array>
#include <cstdint>

namespace thalweg {

enum class GradientPath : uint8_t {
  kCpu = 1,     // the worker copies them from its own memory
  kPinned = 2,  // the device copies them asynchronously
  // Like kPinned, but the device cannot lock the results' memory: the worker's driver copies
  // results and waits.
  kPageable = 3,
  kIpc = 4,  // the sidecar reads them on the same device
};

inline constexpr std::array kGradientPaths = {GradientPath::kCpu, GradientPath::kPinned,
                                              GradientPath::kPageable, GradientPath::kIpc};

// Returns true for the values above; any other value came from outside and must be refused.
constexpr bool IsValid(GradientPath path) {
  return path >= GradientPath::kCpu && path <= GradientPath::kIpc;
}

// Returns the name for logs, metrics and statistics.
constexpr const char* Name(GradientPath path) {
  switch (path) {
    case GradientPath::kCpu:
      return "cpu";
    case GradientPath::kPinned:
      return "pinned";
    case GradientPath::kPageable:
      return "pageable";
    case GradientPath::kIpc:
      return "ipc";
  }
  return "unknown";
}

}  // namespace thalweg
