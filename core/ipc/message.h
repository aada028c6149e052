// A message between a worker and its sidecar is one of those in the headers below; this header has
// their bytes.
//
// A message is one frame on the stream. Integers are little-endian.
//
//   byte  size  field
//   0     4   A magic       "THW1"
//   4     2   B type        1 … 33, in the order of Message's alternatives
//   6     2   C flags       1: a file descriptor comes with the frame's first byte; else 0
//   8     4   D body bytes  at most kMaxFrameBytes
//   12    D   E body        the message's fields in the order of their declaration, without
//   padding:
//
//   u32, u64, i64   as they are
//   f64             IEEE 754
//   bool            u8, 0 or 1
//   DType, GradientPath, CollectiveKind, Fold, Optimizer, SnapshotAction, UpdateRound, WireFormat
//                   u8, one of the valid values
//   CodecPolicy     string, as CodecPolicy::ToString writes it
//   StatusCode      u32, 1 … 16 (never OK)
//   string          u32 length, then the bytes
//   DeviceMemory    its three strings
//   ShardPlace      string address, u32 host
//   list            u32 count, then each u32 (at most kMaxTensors), u64, ShardPlace or string
//                   (kMaxShards), GroupStep (kMaxUpdateGroups) or f64 (kMaxFrameBytes / 8)
//   optional        bool, then the value if it is there
//   BucketId        u32 index, u32 generation
//   BucketLayout    DType dtype, u32 count (at most kMaxTensors), then each TensorSpec
//   TensorSpec      string name, u32 count (at most kMaxDims), then each dimension as i64
//   UpdateRule, GroupStep, JobTerms  their fields
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

#include "absl/status/statusor.h"
#include "core/ipc/bucket_messages.h"
#include "core/ipc/collective_messages.h"
#include "core/ipc/job_messages.h"
#include "core/ipc/weights_messages.h"

namespace thalweg::ipc {

using Message =
    std::variant<Hello, Welcome, RegisterBucket, BucketReady, Submit, Complete, Fail, Leave,
                 GetCodecState, CodecState, Precision, HostShard, ShardHosted, Alive, MakeGroup,
                 ShareArena, Collect, Collected, Taken, Send, Receive, SetSettings, GetWeights,
                 Weights, WeightsTaken, GetSnapshots, Snapshots, CollectedPart, Placed, KeptBucket,
                 KeptResult, CodecMemory, Lost>;

inline constexpr size_t kFrameHeaderBytes = 12;
inline constexpr uint32_t kMaxFrameBytes = 16 << 20;
inline constexpr uint32_t kMaxTensors = 1'000'000;
inline constexpr uint32_t kMaxDims = 64;  // as in torch
inline constexpr uint64_t kMaxBucketElems = uint64_t{1} << 48;

// Returns "Hello", "RegisterBucket" …, for error messages.
const char* Name(const Message& message);

struct FrameHeader {
  uint16_t type = 0;
  bool has_fd = false;
  uint32_t body_bytes = 0;
};

// Returns the whole frame. The caller must keep the message within the bounds above.
std::string EncodeFrame(const Message& message, bool has_fd);

// Both take the peer's bytes. They return InvalidArgument, naming what was expected and what was
// there, for everything that EncodeFrame does not produce from a message within the bounds above.
// `bytes` must be kFrameHeaderBytes long, and `body` as long as its header says.
absl::StatusOr<FrameHeader> ParseFrameHeader(std::span<const std::byte> bytes);
absl::StatusOr<Message> ParseBody(uint16_t type, std::span<const std::byte> body);

}  // namespace thalweg::ipc
