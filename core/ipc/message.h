// What workers and their sidecar say to each other, and how it looks as bytes.
//
// A message is one frame on the stream. Integers are little-endian.
//
//   byte  size  field
//   0     4   A magic       "THW1"
//   4     2   B type        1 … 11, in the order of Message's alternatives
//   6     2   C flags       1: a file descriptor comes with the frame's first byte; else 0
//   8     4   D body bytes  at most kMaxFrameBytes
//   12    D   E body        the message's fields in the order of their declaration, without
//   padding:
//
//   u32, u64, i64   as they are
//   f64             IEEE 754
//   DType, GradientPath  u8, one of the valid values
//   CodecPolicy     string, as CodecPolicy::ToString writes it
//   StatusCode      u32, 1 … 16 (never OK)
//   string          u32 length, then the bytes
//   DeviceMemory    its three strings
//   BucketId        u32 index, u32 generation
//   BucketLayout    DType dtype, u32 count (at most kMaxTensors), then each TensorSpec
//   TensorSpec      string name, u32 count (at most kMaxDims), then each dimension as i64
//
// A layout's dimensions are not negative, and its elements, counting 0-sized dimensions as 1, are
// at most kMaxBucketElems. There is exactly one encoding of a message. docs/ipc.md has a worked
// example.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/codec_policy.h"
#include "core/base/dtype.h"
#include "core/base/gradient_path.h"
#include "core/base/layout.h"
#include "core/ipc/device_memory.h"

namespace thalweg {

// Worker: who I am. The first message on a connection.
struct Hello {
  uint32_t ipc_version = 0;  // kIpcVersion
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint32_t node = 0;
  uint32_t num_nodes = 0;
  std::string node_name;
  uint32_t local_rank = 0;
  uint32_t local_size = 0;
  CodecPolicy codec;
  uint64_t chunk_bytes = 0;  // 0: to be chosen
  uint64_t timeout_ms = 0;
  GradientPath path = GradientPath::kCpu;  // unless the sidecar can work on a device's memory
  DeviceMemory probe;                      // for the sidecar to try that; empty: not wanted
  bool operator==(const Hello&) const = default;
};

// Sidecar: all workers of the job are here.
struct Welcome {
  uint64_t epoch = 0;
  uint32_t num_shards = 0;
  std::string server_version;
  uint64_t chunk_bytes = 0;                // as agreed by all nodes
  GradientPath path = GradientPath::kCpu;  // that this worker's gradients are to take
  bool operator==(const Welcome&) const = default;
};

// Worker: a bucket and, as descriptor, the arena in which its gradients will lie, or else the
// memory of a GPU.
struct RegisterBucket {
  BucketId id;
  BucketLayout layout;
  DeviceMemory memory;
  bool operator==(const RegisterBucket&) const = default;
};

// Sidecar: the bucket is registered; the descriptor is the arena in which its results will lie. On
// a GPU they lie in `memory`, and only the arena's counter is used.
struct BucketReady {
  BucketId id;
  DeviceMemory memory;
  bool operator==(const BucketReady&) const = default;
};

// Worker: a round begins; the arena fills, chunk by chunk.
struct Submit {
  BucketId id;
  uint64_t round = 0;
  bool operator==(const Submit&) const = default;
};

// Sidecar: the round's result lies in the result arena, whole.
struct Complete {
  BucketId id;
  uint64_t round = 0;
  uint32_t workers = 0;  // how many the mean is over
  uint64_t nonfinite_elems = 0;
  uint64_t wire_bytes_sent = 0;
  uint64_t wire_bytes_received = 0;
  uint64_t reduce_ns = 0;
  uint64_t wait_ns = 0;
  uint64_t wire_ns = 0;
  uint64_t decode_ns = 0;
  uint64_t compressed_since = 0;  // the iteration, from 1, in which compression began; 0: not yet
  // Over all that is compressed: the norm of what is left for later, and its share of what was to
  // be sent. Sampled.
  double residual_norm = 0;
  double error_ratio = 0;
  bool operator==(const Complete&) const = default;
};

// Either: the job is over, for this reason. `code` is never kOk.
struct Fail {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string message;
  bool operator==(const Fail&) const = default;
};

// Worker: done, without complaint.
struct Leave {
  bool operator==(const Leave&) const = default;
};

// Worker: asks for what the codec carries from round to round. Nothing may be in flight.
struct GetCodecState {
  bool operator==(const GetCodecState&) const = default;
};

// Sidecar: that state. Worker: put this in its place. The descriptor is an arena that holds it.
struct CodecState {
  uint64_t bytes = 0;
  bool operator==(const CodecState&) const = default;
};

// A node's first worker, at any time: what loss scaling has come to.
struct Precision {
  double loss_scale = 0;
  uint64_t skipped_steps = 0;  // since the last such message
  bool operator==(const Precision&) const = default;
};

using Message = std::variant<Hello, Welcome, RegisterBucket, BucketReady, Submit, Complete, Fail,
                             Leave, GetCodecState, CodecState, Precision>;

inline constexpr size_t kFrameHeaderBytes = 12;
inline constexpr uint32_t kMaxFrameBytes = 16 << 20;
inline constexpr uint32_t kMaxTensors = 1'000'000;
inline constexpr uint32_t kMaxDims = 64;  // as in torch
inline constexpr uint64_t kMaxBucketElems = uint64_t{1} << 48;

// "Hello", "RegisterBucket" …, for error messages.
const char* Name(const Message& message);

struct FrameHeader {
  uint16_t type = 0;
  bool has_fd = false;
  uint32_t body_bytes = 0;
};

// The whole frame. The caller sees to it that what it encodes is within the bounds above.
std::string EncodeFrame(const Message& message, bool has_fd);

// Both take bytes as the peer sent them and answer InvalidArgument, naming what was expected and
// what was there, to everything that EncodeFrame does not make of a message within the bounds
// above. `bytes` must be kFrameHeaderBytes long, and `body` as long as its header says.
absl::StatusOr<FrameHeader> ParseFrameHeader(std::span<const std::byte> bytes);
absl::StatusOr<Message> ParseBody(uint16_t type, std::span<const std::byte> body);

}  // namespace thalweg
