#include "core/exchange/rounds.h"

#include "absl/strings/str_cat.h"

namespace thalweg {

std::string ToString(const RoundId& id) {
  if (!IsOneShot(id)) {
    return absl::StrCat("bucket ", ToString(id.bucket), " round ", id.round, " chunk ", id.chunk);
  }
  return absl::StrCat("one-shot round ", id.round, " of group ", id.bucket.generation, " chunk ",
                      id.chunk);
}

}  // namespace thalweg
