// Policies of codecs, which come with each node that joins: what is accepted has a canonical text,
// which says the same.

#include <string>

#include "core/base/codec_policy.h"
#include "core/base/fuzzing.h"

namespace thalweg {
namespace {

void Parse(const std::string& text) {
  const absl::StatusOr<CodecPolicy> policy = CodecPolicy::Parse(text);
  if (!policy.ok()) {
    return Promise(absl::IsInvalidArgument(policy.status()), "a text is refused as invalid");
  }
  const std::string canonical = policy->ToString();
  Promise(canonical.size() <= kMaxPolicyBytes, "a canonical text has bounded length");
  const absl::StatusOr<CodecPolicy> again = CodecPolicy::Parse(canonical);
  Promise(again.ok(), "a canonical text is accepted");
  Promise(*again == *policy, "a canonical text says the same");
  Promise(again->ToString() == canonical, "a policy has one canonical text");
  const auto codecs = policy->Codecs();
  Promise(!codecs.empty() && codecs.size() <= kMaxCodecs, "a policy has a few codecs");
  // Patterns of names must not take exponential time.
  policy->CodecOf({std::string(200, 'a'), {64, 64}});
}

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thalweg::Parse(thalweg::FuzzInput(data, size).Text(size));
  return 0;
}
