// The states that codecs carry from round to round, and their bytes: a worker can ask its sidecar
// for them, keep them in a checkpoint, and hand them back to go on bit for bit.
//
//   byte  size  field
//   0     4     A magic    "TWS3"
//   4     4     B count    parameters that follow, by name
//
// each of which is, without padding, integers little-endian:
//
//   u32 name's length, the name, u64 rounds, u64 factor's elements, u64 residual's elements,
//   u64 shard residual's elements, the factor, the residual, the shard residual as float32
//
// with both residuals in true units: without the loss scale that gradients carry.
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
#include "core/base/layout.h"
#include "core/base/loss_scale.h"
#include "server/sidecar/codec/residual.h"

namespace thalweg {

struct ParameterState {
  // This node's; empty: none. In a round of PowerSGD this is the matrix itself, unless the round
  // makes the next residual elsewhere (BucketCodec::MakeResidualsIn).
  Residual residual;
  std::vector<float> factor;  // PowerSGD's Q transposed, rank × columns; empty: none yet
  uint64_t rounds = 0;        // that the parameter has been reduced in
  // What the shards have left out of the results. Only while a state is saved or loaded, and only
  // on node 0. In true units.
  std::vector<float> shard_residual;
  double loss_scale = kUnknownLossScale;  // in whose units `residual` is
};

// By parameter name, so that it survives when DDP cuts its buckets anew. Guarded by
// the mutex of CodecStates; the states themselves belong to the round in flight of the bucket that
// holds the parameter.
using ParameterStates = std::map<std::string, std::shared_ptr<ParameterState>>;

// The state of a parameter, new if there is none. InvalidArgument when there is one of another
// size.
absl::StatusOr<std::shared_ptr<ParameterState>> StateOf(ParameterStates& states,
                                                        const TensorSpec& parameter);

// Converts the residuals to true units, for Encode.
void ToTrueUnits(ParameterStates& states);

size_t EncodedBytes(const ParameterStates& states);
// `out` has EncodedBytes(states) bytes.
void Encode(const ParameterStates& states, std::span<std::byte> out);
// Decodes bytes from an untrusted source. InvalidArgument says what is wrong with them, also if an
// earlier release has made them.
absl::StatusOr<ParameterStates> DecodeParameterStates(std::span<const std::byte> bytes);

// Puts `loaded` in the place of the states that there are, which keep their addresses: those of
// other names begin anew, and one without residual makes a residual that is there zero.
// InvalidArgument names a parameter whose sizes differ; then nothing has changed.
absl::Status Replace(ParameterStates& states, ParameterStates loaded);

}  // namespace thalweg
