// A CodecSpec says how gradients cross the network: one codec as a line of text. A policy
// (codec_policy.h) assigns codecs to tensors.
//
//   fp32 | fp16 | bf16                        every gradient, in that type
//   powersgd:rank=4,start=1000,min_rate=2,wire=fp32,warm=1,feedback=1,seed=0,epsilon=0
//   int8:start=2,feedback=1                   or another name of lossy_formats.h
//   topk:ratio=0.01,start=2,feedback=1        or another name there that takes a ratio
//   auto:rank=4,start=1000,seed=0             for each bucket whichever of AutoCandidates is
//   fastest
//
// Keys are optional and may come in any order; "powersgd:4", "topk:0.01" and "auto:4" give the
// value of the first key.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/dtype.h"
#include "core/base/wire_format.h"

namespace thalweg {

enum class CodecKind : uint8_t {
  kCast,      // only a narrower type
  kPowerSgd,  // low-rank factors of every matrix that shrinks enough
  kLossy,     // chunk by chunk in a lossy format of lossy_formats.h
  kAuto,      // is replaced by the candidate that it chooses
};

struct CodecSpec {
  CodecKind kind = CodecKind::kCast;
  // The type in which fp32 gradients, or the factors of their matrices, cross the network. It is
  // fp32 for the lossy kinds and auto, because they send unchanged what they leave uncompressed.
  DType wire = DType::kFloat32;
  WireFormat format = WireFormat::kFloat32;  // of a kLossy: the lossy format; else not used

  // Each further member applies to the kinds whose text form contains it. Parse sets the defaults
  // that the text forms above show; the defaults here are PowerSGD's, which equal those of torch's
  // hook.
  uint32_t rank = 1;
  uint64_t start = 1000;     // number of the first iterations, which are not compressed
  double min_rate = 2;       // a matrix is compressed if it shrinks by more than this factor
  bool warm = true;          // start from the previous iteration's factors
  bool feedback = true;      // add the compression error to the next gradient
  uint64_t seed = 0;         // seed of the first factors
  double epsilon = 0;        // added to the norms that columns are divided by
  double topk_ratio = 0.01;  // fraction of the elements; "ratio" in the text form

  // Parses `text`. InvalidArgument says which part is wrong and what is allowed.
  static absl::StatusOr<CodecSpec> Parse(absl::string_view text);
  // Returns the text with every key of its kind, in the order above: equal specs from Parse give
  // equal texts.
  std::string ToString() const;
  // Returns "fp16", "powersgd", "int8", …
  std::string Name() const;

  bool operator==(const CodecSpec&) const = default;
};

inline bool IsLossy(const CodecSpec& codec) { return codec.kind == CodecKind::kLossy; }

// Returns the format in which a lossy codec sends what it compresses. Requires IsLossy(codec).
inline WireFormat LossyFormat(const CodecSpec& codec) { return codec.format; }

// Returns the codecs that an auto chooses from, the most exact first: fp32, fp16, int8, and
// PowerSGD with the rank, start and seed of `codec`.
std::vector<CodecSpec> AutoCandidates(const CodecSpec& codec);

// Returns the type in which a bucket of `bucket` elements crosses the network uncompressed. Only
// fp32 gradients are narrowed: half types are already small, and users of fp64 want its precision.
DType DenseType(DType bucket, const CodecSpec& codec);

}  // namespace thalweg
