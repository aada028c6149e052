// How gradients cross the network: one codec as a line of text. Which tensors take which codec is
// said by a policy (codec_policy.h).
//
//   fp32 | fp16 | bf16                        every gradient, in that type
//   powersgd:rank=4,start=1000,min_rate=2,wire=fp32,warm=1,feedback=1,seed=0,epsilon=0
//   int8:start=2,feedback=1                   blocks of 8-bit numbers with a scale each
//   onebit:start=2,feedback=1                 signs, with a scale per block
//   topk:ratio=0.01,start=2,feedback=1        the largest elements alone
//   auto:rank=4,start=1000,seed=0             for each bucket whichever of AutoCandidates is
//   fastest
//
// Keys may be left out and come in any order; "powersgd:4", "topk:0.01" and "auto:4" give the first
// key alone.
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
  kCast,      // nothing but a narrower type
  kPowerSgd,  // low-rank factors of every matrix that has enough to gain
  kInt8,      // the lossy formats of docs/codecs.md
  kOneBit,
  kTopK,
  kAuto,  // stands for the candidate that is chosen in its stead
};

struct CodecSpec {
  CodecKind kind = CodecKind::kCast;
  // In which fp32 gradients, or the factors of their matrices, cross the network. The lossy kinds
  // and auto have fp32: what they leave uncompressed goes as it is.
  DType wire = DType::kFloat32;

  // The rest has a meaning for the kinds in whose text form it is. Parse sets the defaults that the
  // text forms above show; those here are PowerSGD's, which are those of torch's hook.
  uint32_t rank = 1;
  uint64_t start = 1000;     // iterations before it that go without compression
  double min_rate = 2;       // a matrix is compressed if that makes it smaller by more than this
  bool warm = true;          // begin with the last iteration's factors
  bool feedback = true;      // add what was lost to the next gradient
  uint64_t seed = 0;         // of the first factors
  double epsilon = 0;        // added to norms by which columns are divided
  double topk_ratio = 0.01;  // of the elements; "ratio" in the text form

  // InvalidArgument says which part of `text` is wrong, and what is known.
  static absl::StatusOr<CodecSpec> Parse(absl::string_view text);
  // With every key that its kind has, in the order above: equal for equal specs that Parse gave.
  std::string ToString() const;
  // "fp16", "powersgd", "int8", …
  std::string Name() const;

  bool operator==(const CodecSpec&) const = default;
};

// True for int8, onebit and topk.
bool IsLossy(const CodecSpec& codec);

// The format in which a lossy codec sends what it compresses. Requires IsLossy(codec).
WireFormat LossyFormat(const CodecSpec& codec);

// What an auto codec chooses from, the most exact first: fp32, fp16, int8, and PowerSGD with the
// rank, start and seed of `codec`.
std::vector<CodecSpec> AutoCandidates(const CodecSpec& codec);

// The type in which a bucket of `bucket` elements crosses the network uncompressed. Only fp32
// gradients are narrowed: half types are already small, and whoever trains in fp64 asked for the
// digits.
DType DenseType(DType bucket, const CodecSpec& codec);

}  // namespace thalweg
