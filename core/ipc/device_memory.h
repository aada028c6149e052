// Memory of a GPU that one process shares with another.
#pragma once

#include <string>

namespace thalweg {

// What a worker puts into the memory with which a sidecar tries out whether it can share.
inline constexpr char kDeviceProbe[64] = "memory of a GPU that a Thalweg worker shares";

// All fields as DeviceRuntime (core/device) makes them; empty when nothing is shared.
struct DeviceMemory {
  std::string uuid;    // of the device
  std::string memory;  // what OpenMemory takes
  std::string event;   // what OpenEvent takes; reached when what the memory holds is there
  bool operator==(const DeviceMemory&) const = default;
};

}  // namespace thalweg
