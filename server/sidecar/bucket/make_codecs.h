// Makes the codecs of a bucket, as the job's policy says.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/codec_policy.h"
#include "core/base/layout.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

struct CodecChoice {
  const CodecPolicy& policy;
  // The number, among policy.Codecs(), of what auto has chosen for the bucket; else of no meaning.
  uint32_t auto_choice = 0;
};

// The parts of the policy's codec number k are 1 + k · kPartsPerCodec and those that follow.
inline constexpr uint32_t kPartsPerCodec = 3;
static_assert(1 + kMaxCodecs * kPartsPerCodec <= kMaxParts);

// For each tensor, the number of its codec among policy.Codecs().
std::vector<uint32_t> AssignCodecs(const BucketLayout& bucket, const CodecChoice& choice);

// Takes the bucket as it is, as part 0: in the widest of the types in which its codecs send what
// they do not compress.
std::unique_ptr<DenseCodec> MakeDenseCodec(const BucketLayout& bucket, BucketMemory& memory,
                                           const CodecPlace& place, const CodecChoice& choice);

// Between them they take every tensor that has elements; none if the bucket is best taken as it is.
// InvalidArgument names a tensor whose state, which somebody has loaded, is of another size.
absl::StatusOr<std::vector<std::unique_ptr<BucketCodec>>> MakeCodecs(const BucketLayout& bucket,
                                                                     BucketMemory& memory,
                                                                     const CodecPlace& place,
                                                                     const CodecChoice& choice,
                                                                     ParameterStates& states);

}  // namespace thalweg
