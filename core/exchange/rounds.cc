#include "core/exchange/rounds.h"

#include "absl/strings/str_cat.h"

namespace thalweg {

std::string ToString(const RoundId& id) {
  if (IsLetter(id)) return absl::StrCat("letter ", id.round, " of node ", SenderOf(id));
  if (!IsOneShot(id)) {
    return absl::StrCat("bucket ", ToString(id.bucket), " round ", id.round, " chunk ", id.chunk);
  }
  return absl::StrCat("collective ", id.round, " of group ", GroupOf(id), " chunk ", id.chunk);
}

bool HasRightSize(uint32_t node, const Contribution& contribution) {
  const uint64_t bytes = contribution.payload.SizeBytes();
  if (!contribution.collective.from.Has(node)) return bytes == 0;
  return IsPayloadSize(contribution.wire, contribution.elems, bytes);
}

}  // namespace thalweg
