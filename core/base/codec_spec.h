// Which codec a job uses, and how: one line of text on which workers, sidecars and shards agree.
//
//   fp32 | fp16 | bf16                        every gradient, in that type
//   powersgd:rank=4,start=1000,min_rate=2,wire=fp32,warm=1,feedback=1,seed=0,epsilon=0
//
// Keys may be left out and come in any order; "powersgd:4" gives the rank alone.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/dtype.h"

namespace thalweg {

enum class CodecKind : uint8_t {
  kCast,      // nothing but a narrower type
  kPowerSgd,  // low-rank factors of every matrix that has enough to gain
};

struct CodecSpec {
  CodecKind kind = CodecKind::kCast;
  // In which fp32 gradients, or the factors of their matrices, cross the network.
  DType wire = DType::kFloat32;

  // The rest is for PowerSGD. Defaults are those of torch's hook.
  uint32_t rank = 1;
  uint64_t start = 1000;  // iterations before it that go without compression
  double min_rate = 2;    // a matrix is compressed if that makes it smaller by more than this
  bool warm = true;       // begin with the last iteration's factors
  bool feedback = true;   // add what was lost to the next gradient
  uint64_t seed = 0;      // of the first factors
  double epsilon = 0;     // added to norms by which columns are divided

  // InvalidArgument says which part of `text` is wrong, and what is known.
  static absl::StatusOr<CodecSpec> Parse(absl::string_view text);
  // With every key that its kind has, in the order above: equal for equal specs.
  std::string ToString() const;
  // "fp16" or "powersgd".
  std::string Name() const;

  bool operator==(const CodecSpec&) const = default;
};

// The type in which a bucket of `bucket` elements crosses the network uncompressed. Only fp32
// gradients are narrowed: half types are already small, and whoever trains in fp64 asked for the
// digits.
DType DenseType(DType bucket, const CodecSpec& codec);

// The type in which a worker leaves its share of a bucket for its sidecar: a node's only worker
// narrows while it copies, unless the sidecar needs the digits to compress them; of several, the
// shares are folded first and narrowed then.
DType ShareType(DType bucket, const CodecSpec& codec, uint32_t workers_on_node);

}  // namespace thalweg
