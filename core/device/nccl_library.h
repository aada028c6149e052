// NcclApi is NCCL, loaded when it is needed: a node whose workers share one GPU needs none.
// Therefore no program links NCCL, and building needs none of its headers. This header declares
// what we use of its ABI, which has been the same since 2.18.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "core/device/device_runtime.h"

namespace thalweg {

// NcclComm is ncclComm_t: one member of a communicator.
using NcclComm = struct NcclCommTag*;

// ncclResult_t
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;
// ncclDataType_t
inline constexpr int kNcclUint8 = 1;
inline constexpr int kNcclFloat16 = 6;
inline constexpr int kNcclFloat32 = 7;
inline constexpr int kNcclFloat64 = 8;
inline constexpr int kNcclBFloat16 = 9;
// ncclRedOp_t
inline constexpr int kNcclSum = 0;

// NcclApi holds NCCL's functions in snake case; a DeviceStream is CUDA's stream. Enumerations are
// ints.
struct NcclApi {
  int (*comm_init_all)(NcclComm* comms, int count, const int* devices) = nullptr;
  int (*comm_destroy)(NcclComm comm) = nullptr;
  int (*comm_abort)(NcclComm comm) = nullptr;
  int (*comm_get_async_error)(NcclComm comm, int* error) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*reduce)(const void* send, void* receive, size_t elems, int type, int operation, int root,
                NcclComm comm, DeviceStream stream) = nullptr;
  int (*broadcast)(const void* send, void* receive, size_t elems, int type, int root, NcclComm comm,
                   DeviceStream stream) = nullptr;
  const char* (*get_error_string)(int error) = nullptr;
  const char* (*get_last_error)(NcclComm comm) = nullptr;
};

// Loads the library of that path, or of that name from the system's library path; it stays loaded.
// No GPU is needed. NotFound: it cannot be loaded; FailedPrecondition: it is not NCCL, or not of a
// version from 2.18 to 2.28. Messages say what to install. Thread-safe.
absl::StatusOr<NcclApi> LoadNccl(const std::string& path);

// Formats ncclGetVersion's number, such as "2.28.9".
std::string NcclVersionName(int version);

}  // namespace thalweg
