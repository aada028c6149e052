// How a worker's gradients come to its node's sidecar, and results back. The numeric values are
// part of the ipc format: never renumber.
#pragma once

#include <array>
#include <cstdint>

namespace thalweg {

enum class GradientPath : uint8_t {
  kCpu = 1,     // the worker copies them from its own memory
  kPinned = 2,  // a device copies them, by itself
  // So, but it cannot lock the results' memory: the worker's driver copies these, and waits.
  kPageable = 3,
  kIpc = 4,  // the sidecar reads them on the same device
};

inline constexpr std::array kGradientPaths = {GradientPath::kCpu, GradientPath::kPinned,
                                              GradientPath::kPageable, GradientPath::kIpc};

// True for the values above; anything else came from outside and must be refused.
constexpr bool IsValid(GradientPath path) {
  return path >= GradientPath::kCpu && path <= GradientPath::kIpc;
}

// As logs, metrics and statistics name it.
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
