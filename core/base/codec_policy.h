// A CodecPolicy says which tensor uses which codec. It is one line of text that a job's workers,
// sidecars and shards agree on.
//
//   POLICY = CODEC[;RULE]…        the default, then exceptions to it
//   RULE   = MATCH[&MATCH]…=CODEC for tensors for which every MATCH holds
//   MATCH  = a pattern of the parameter's name, where * stands for any bytes and ? for one;
//            or elems<N, elems>N, dims<N, dims>N
//
//   powersgd:rank=4;embed*.weight=fp32;elems<4096=fp16
//
// The first rule that holds for a tensor decides; each rule has at most one pattern and one bound
// of each kind. CODEC is as in codec_spec.h; auto is allowed as the default only. Spaces around the
// pieces are ignored.
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

// The canonical text of a policy has at most this length.
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

  // Returns true when all conditions above hold for `tensor`.
  bool Matches(const TensorSpec& tensor) const;
  bool operator==(const CodecRule&) const = default;
};

struct CodecPolicy {
  CodecSpec fallback;
  std::vector<CodecRule> rules;

  // Parses `text`. InvalidArgument says which part is wrong and what is allowed; it is also
  // returned for more than kMaxCodecs codecs or a canonical text of more than kMaxPolicyBytes.
  static absl::StatusOr<CodecPolicy> Parse(absl::string_view text);
  // Returns the canonical text: every key of every codec; in each rule first the pattern, unless it
  // is just *, then elems>, elems<, dims>, dims<. Equal policies have equal texts.
  std::string ToString() const;

  // Returns the distinct codecs in order of first mention, beginning with the default; an auto is
  // replaced by its AutoCandidates.
  std::vector<CodecSpec> Codecs() const;
  // Returns the codec of `tensor`, possibly an auto. Valid as long as the policy is.
  const CodecSpec& CodecOf(const TensorSpec& tensor) const;
  // Returns true when the policy only narrows the type: a cast, without rules.
  bool IsPlainCast() const;

  bool operator==(const CodecPolicy&) const = default;
};

// Returns the type in which a worker stores its share of a bucket for its sidecar. A node's only
// worker narrows while it copies, unless the sidecar needs full precision for some tensors. With
// several workers, the shares are folded first and narrowed afterwards. A device copies without
// narrowing.
DType ShareType(DType bucket, const CodecPolicy& codec, uint32_t workers_on_node,
                GradientPath path);

}  // namespace thalweg
