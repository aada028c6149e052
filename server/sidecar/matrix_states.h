// What PowerSGD carries from round to round, and how it looks as bytes: a worker can ask its
// sidecar for them, keep them in a checkpoint, and hand them back to go on bit for bit.
//
//   byte  size  field
//   0     4     A magic    "TWS1"
//   4     4     B count    matrices that follow, by name
//
// each of which is, without padding, integers little-endian:
//
//   u32 name's length, the name, u64 rounds, u64 factor's elements, u64 residual's elements,
//   the factor, the residual as float32
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace thalweg {

struct MatrixState {
  std::vector<float> residual;  // rows × columns; in mid-round the matrix itself
  std::vector<float> factor;    // Q transposed, rank × columns; empty: none yet
  uint64_t rounds = 0;          // that the parameter has been reduced in
};

// By parameter name, so that it survives when DDP cuts its buckets anew. Guarded by the mutex of
// the NodeJob; the states themselves belong to the round in flight of the bucket that holds the
// parameter.
using MatrixStates = std::map<std::string, std::shared_ptr<MatrixState>>;

size_t EncodedBytes(const MatrixStates& states);
// `out` has EncodedBytes(states) bytes.
void Encode(const MatrixStates& states, std::span<std::byte> out);
// Of bytes that nobody vouches for: InvalidArgument says what is wrong with them.
absl::StatusOr<MatrixStates> DecodeMatrixStates(std::span<const std::byte> bytes);

// Puts `loaded` in the place of states of the same names, which keep their addresses.
// InvalidArgument names a parameter whose sizes differ; then nothing has changed.
absl::Status Replace(MatrixStates& states, MatrixStates loaded);

}  // namespace thalweg
