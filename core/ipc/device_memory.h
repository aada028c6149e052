// DeviceMemory is memory of a GPU that one process shares with another.
#pragma once

#include <string>

namespace thalweg {

// A worker writes this into the memory with which a sidecar tests whether it can share.
inline constexpr char kDeviceProbe[64] = "memory of a GPU that a Thalweg worker shares";

// DeviceRuntime (core/device) makes all fields; they are empty when nothing is shared.
struct DeviceMemory {
  std::string uuid;    // device's UUID
  std::string memory;  // argument of OpenMemory
  std::string event;   // argument of OpenEvent; reached when the memory holds its contents
  bool operator==(const DeviceMemory&) const = default;
};

}  // namespace thalweg
