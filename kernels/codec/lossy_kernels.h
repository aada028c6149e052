// LossyKernels is what a lossy wire format provides for processors; kernels/codec/lossy.h is the
// front through which everything else uses it. Each format of the registry
// (core/base/lossy_formats.h) has a function <Name>Kernels(), which the format's folder defines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/dtype.h"
#include "core/base/payload.h"
#include "core/base/wire_format.h"
#include "kernels/codec/encoded.h"
#include "kernels/codec/feedback.h"
#include "kernels/codec/weighting.h"

namespace thalweg {

// All functions require elems ≤ kMaxLossyElems and are thread-safe. They follow the contracts of
// EncodeLossy, DecodeLossy, CountOverflow and FoldLossy, which have checked the format, the type
// and the weights.
class LossyKernels {
 public:
  virtual Encoded Encode(double topk_ratio, const float* values, Feedback feedback, uint64_t elems,
                         std::byte* out) const = 0;
  // `bucket` is fp32, fp16 or bf16.
  virtual absl::Status Decode(const Payload& payload, DType bucket, uint64_t elems,
                              std::byte* out) const = 0;
  // Returns how many elements of what Decode has taken are finite and not smaller than `least`.
  virtual uint64_t CountLarge(const Payload& payload, float least, uint64_t elems) const = 0;
  virtual absl::StatusOr<Encoded> Fold(std::span<const Payload> contributions,
                                       const Weighting& weighting, uint64_t elems, float* residual,
                                       std::byte* out) const = 0;

 protected:
  ~LossyKernels() = default;
};

#define THALWEG_DECLARE_KERNELS(Name, ...) const LossyKernels& Name##Kernels();
THALWEG_LOSSY_FORMATS(THALWEG_DECLARE_KERNELS)
#undef THALWEG_DECLARE_KERNELS

}  // namespace thalweg
