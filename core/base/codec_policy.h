// Which tensor takes which codec: the one line of text that a job's workers, sidecars and shards
// agree on.
//
//   POLICY = CODEC[;RULE]…        the default, then exceptions to it
//   RULE   = MATCH[&MATCH]…=CODEC for tensors for which every MATCH holds
//   MATCH  = a pattern of the parameter's name, where * stands for any bytes and ? for one;
//            or elems<N, elems>N, dims<N, dims>N
//
//   powersgd:rank=4;embed*.weight=fp32;elems<4096=fp16
//
// The first rule that holds for a tensor decides; each rule has one pattern and one bound of each
// sort at most. CODEC is as in codec_spec.h; auto can be the default only. Spaces around the pieces
// are ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/codec_spec.h"
#include "core/base/gradient_path.h"
#include "core/base/layout.h"

namespace thalweg {

// Of a policy's canonical text.
inline constexpr size_t kMaxPolicyBytes = size_t{64} << 10;
inline constexpr size_t kMaxCodecs = 5;

struct CodecRule {
  static constexpr uint64_t kUnbounded = std::numeric_limits<uint64_t>::max();

  std::string name = "*";  // a pattern without ';', '&', '=', '<' and '>'
  uint64_t min_elems = 0;
  uint64_t max_elems = kUnbounded;
  uint64_t min_dims = 0;
  uint64_t max_dims = kUnbounded;
  CodecSpec codec = {};

  // True when all of the above holds for `tensor`.
  bool Matches(const TensorSpec& tensor) const;
  bool operator==(const CodecRule&) const = default;
};

struct CodecPolicy {
  CodecSpec fallback;
  std::vector<CodecRule> rules;

  // InvalidArgument says which part of `text` is wrong, and what is known; also when it has more
  // than kMaxCodecs codecs, or its canonical text more than kMaxPolicyBytes.
  static absl::StatusOr<CodecPolicy> Parse(absl::string_view text);
  // Every key of every codec; in each rule first the pattern, unless it is a mere *, then elems>,
  // elems<, dims>, dims<. Equal for equal policies.
  std::string ToString() const;

  // The different codecs in order of first mention, beginning with the default; an auto stands for
  // its AutoCandidates.
  std::vector<CodecSpec> Codecs() const;
  // What `tensor` takes, possibly the auto. Valid as long as the policy is.
  const CodecSpec& CodecOf(const TensorSpec& tensor) const;
  // True when nothing but a narrower type is asked for: a cast, without rules.
  bool IsPlainCast() const;

  bool operator==(const CodecPolicy&) const = default;
};

// The type in which a worker leaves its share of a bucket for its sidecar: a node's only worker
// narrows while it copies, unless the sidecar needs the digits of some of them; of several, the
// shares are folded first and narrowed then. A device copies, it does not narrow.
DType ShareType(DType bucket, const CodecPolicy& codec, uint32_t workers_on_node,
                GradientPath path);

}  // namespace thalweg
