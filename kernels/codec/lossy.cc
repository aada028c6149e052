#include "kernels/codec/lossy.h"

#include <algorithm>
#include <cassert>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status_macros.h"
#include "kernels/cast/element.h"
#include "kernels/codec/lossy_kernels.h"
#include "kernels/codec/weighting.h"

namespace thalweg {
namespace {

// Returns null when `format` is not a lossy one.
const LossyKernels* KernelsOf(WireFormat format) {
  switch (format) {
#define THALWEG_KERNELS_CASE(Name, ...) \
  case WireFormat::k##Name:             \
    return &Name##Kernels();
    THALWEG_LOSSY_FORMATS(THALWEG_KERNELS_CASE)
#undef THALWEG_KERNELS_CASE
    default:
      return nullptr;
  }
}

// Returns the kernels of `format`, unless it is not a lossy one or a chunk cannot have `elems`
// elements in it.
absl::StatusOr<const LossyKernels*> CheckedKernels(WireFormat format, uint64_t elems) {
  const LossyKernels* const kernels = KernelsOf(format);
  if (kernels == nullptr) {
    const auto add_name = [](std::string* out, const LossyTraits& t) { out->append(t.name); };
    return absl::InvalidArgumentError(
        absl::StrCat("expected a lossy wire format (", absl::StrJoin(kLossyTraits, ", ", add_name),
                     "), got ", Name(format), " (", static_cast<int>(format), ")"));
  }
  // This check also keeps the sizes computed from `elems`, which comes from a peer, from wrapping
  // around.
  if (elems <= kMaxLossyElems) return kernels;
  return absl::InvalidArgumentError(absl::StrCat("expected at most ", kMaxLossyElems,
                                                 " elements in a chunk of ", Name(format), ", got ",
                                                 elems));
}

}  // namespace

Encoded EncodeLossy(WireFormat format, double topk_ratio, const float* values, Feedback feedback,
                    uint64_t elems, std::byte* out) {
  assert(KernelsOf(format) != nullptr && elems <= kMaxLossyElems);
  return KernelsOf(format)->Encode(topk_ratio, values, feedback, elems, out);
}

absl::Status DecodeLossy(const Payload& payload, WireFormat format, DType bucket, uint64_t elems,
                         void* out) {
  THALWEG_ASSIGN_OR_RETURN(const LossyKernels* const kernels, CheckedKernels(format, elems));
  if (bucket != DType::kFloat32 && bucket != DType::kFloat16 && bucket != DType::kBFloat16) {
    return absl::InvalidArgumentError(absl::StrCat("decode: a bucket of type ", Name(bucket),
                                                   " never crosses the network as ", Name(format),
                                                   ": expected fp32, fp16 or bf16"));
  }
  return kernels->Decode(payload, bucket, elems, static_cast<std::byte*>(out));
}

uint64_t CountOverflow(const Payload& payload, WireFormat format, DType bucket, uint64_t elems) {
  if (bucket == DType::kFloat32) return 0;
  const float least = bucket == DType::kFloat16 ? Fp16::kOverflow : BFloat16::kOverflow;
  return KernelsOf(format)->CountLarge(payload, least, elems);
}

uint64_t MaxFoldedBytes(std::span<const Payload> contributions, WireFormat format, uint64_t elems) {
  const uint64_t most = MaxEncodedBytes(format, elems);
  if (HasFixedSize(format)) return most;
  // An entry of the result needs no more bytes than in the contribution that it comes from: the gap
  // before it has not grown.
  uint64_t together = 0;
  for (const Payload& contribution : contributions) together += contribution.SizeBytes();
  return std::min(most, together);
}

absl::StatusOr<Encoded> FoldLossy(std::span<const Payload> contributions,
                                  std::span<const uint32_t> workers, WireFormat format,
                                  uint64_t elems, float* residual, std::byte* out) {
  THALWEG_ASSIGN_OR_RETURN(const LossyKernels* const kernels, CheckedKernels(format, elems));
  THALWEG_ASSIGN_OR_RETURN(const Weighting weighting, WeightingOf(contributions.size(), workers));
  return kernels->Fold(contributions, weighting, elems, residual, out);
}

}  // namespace thalweg
