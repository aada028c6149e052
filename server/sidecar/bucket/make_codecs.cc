#include "server/sidecar/bucket/make_codecs.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/status_macros.h"

namespace thalweg {
namespace {

DType Widest(DType a, DType b) {
  if (a == b) return a;
  return DType::kFloat32;  // of fp16 and bf16 neither holds the other
}

// Returns the type in which the tensors of a bucket cross the network uncompressed.
DType DenseTypeOf(const BucketLayout& bucket, const CodecChoice& choice) {
  const std::vector<CodecSpec> codecs = choice.policy.Codecs();
  const std::vector<uint32_t> assigned = AssignCodecs(bucket, choice);
  if (assigned.empty()) return bucket.dtype;
  DType type = DenseType(bucket.dtype, codecs[assigned[0]]);
  for (const uint32_t codec : assigned) type = Widest(type, DenseType(bucket.dtype, codecs[codec]));
  return type;
}

TensorSet WholeBucket(const BucketLayout& bucket) {
  std::vector<uint32_t> all(bucket.tensors.size());
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  return {bucket, all};
}

}  // namespace

std::vector<uint32_t> AssignCodecs(const BucketLayout& bucket, const CodecChoice& choice) {
  const std::vector<CodecSpec> codecs = choice.policy.Codecs();
  std::vector<uint32_t> assigned;
  for (const TensorSpec& tensor : bucket.tensors) {
    const CodecSpec& spec = choice.policy.CodecOf(tensor);
    const auto found = std::find(codecs.begin(), codecs.end(), spec);
    assigned.push_back(spec.kind == CodecKind::kAuto
                           ? choice.auto_choice
                           : static_cast<uint32_t>(found - codecs.begin()));
  }
  return assigned;
}

std::unique_ptr<DenseCodec> MakeDenseCodec(const BucketLayout& bucket, BucketMemory& memory,
                                           const CodecPlace& place, const CodecChoice& choice) {
  return memory.MakeCast(WholeBucket(bucket), place, 0, DenseTypeOf(bucket, choice));
}

absl::StatusOr<std::vector<std::unique_ptr<BucketCodec>>> MakeCodecs(const BucketLayout& bucket,
                                                                     BucketMemory& memory,
                                                                     const CodecPlace& place,
                                                                     const CodecChoice& choice,
                                                                     ParameterStates& states) {
  std::vector<std::unique_ptr<BucketCodec>> made;
  // A codec has at most float32's digits; training in float64 asks for more.
  if (bucket.dtype == DType::kFloat64) return made;
  const std::vector<CodecSpec> codecs = choice.policy.Codecs();
  const std::vector<uint32_t> assigned = AssignCodecs(bucket, choice);
  std::map<uint32_t, std::vector<uint32_t>> members;
  for (uint32_t i = 0; i < assigned.size(); ++i) {
    if (bucket.tensors[i].Elems() > 0) members[assigned[i]].push_back(i);
  }
  const DType whole = DenseTypeOf(bucket, choice);
  bool as_it_is = true;
  for (const auto& [k, tensors] : members) {
    const CodecSpec& spec = codecs[k];
    const uint32_t number = 1 + k * kPartsPerCodec;
    const DType dense = DenseType(bucket.dtype, spec);
    TensorSet set(bucket, tensors);
    std::unique_ptr<BucketCodec> codec;
    if (spec.kind == CodecKind::kPowerSgd) {
      THALWEG_ASSIGN_OR_RETURN(codec, memory.MakePowerSgd(set, place, number, dense, spec, states));
    } else if (spec.kind != CodecKind::kCast) {
      THALWEG_ASSIGN_OR_RETURN(codec, memory.MakeLossy(set, place, number, spec, states));
    }
    as_it_is = as_it_is && codec == nullptr && dense == whole;
    if (codec == nullptr) {
      codec = memory.MakeCast(std::move(set), place, number, dense);
    }
    made.push_back(std::move(codec));
  }
  if (as_it_is) made.clear();
  return made;
}

}  // namespace thalweg
