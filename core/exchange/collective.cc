#include "core/exchange/collective.h"

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

std::string ToString(const Place& place) {
  switch (place.kind) {
    case Place::Kind::kAll:
      return "all";
    case Place::Kind::kOne:
      return absl::StrCat("node ", place.node);
    case Place::Kind::kNone:
      return "none";
  }
  return "an unknown place";
}

bool IsOneOrAll(const Place& place) {
  return place.kind == Place::Kind::kAll || place.kind == Place::Kind::kOne;
}

}  // namespace

std::string ToString(const Collective& collective) {
  return absl::StrCat(Name(collective.fold), " from ", ToString(collective.from), " to ",
                      ToString(collective.to));
}

std::string CallText(uint64_t call) {
  const auto kind = static_cast<CollectiveKind>(call >> 32);
  if (call >> 32 > 0xff || !IsValid(kind)) return absl::StrCat("call ", call);
  if (!HasRoot(kind)) return Name(kind);
  return absl::StrCat(Name(kind), " at root ", call & 0xffff'ffff);
}

absl::Status Validate(const Collective& collective, WireFormat wire) {
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no collective '", ToString(collective), "': ", why));
  };
  const auto& [from, to, fold] = collective;
  if (!IsValid(fold)) return refused(absl::StrCat("fold ", static_cast<int>(fold), " is unknown"));
  if (from.kind == Place::Kind::kNone && to.kind == Place::Kind::kNone) {
    return fold == Fold::kNone ? absl::OkStatus() : refused("there is nothing to fold");
  }
  if (collective == kPull) return absl::OkStatus();
  if (!IsOneOrAll(from) || !IsOneOrAll(to)) {
    return refused("expected two places with nodes, or none twice");
  }
  if ((from.kind == Place::Kind::kAll) == (fold == Fold::kNone)) {
    return refused("values from all need a fold, those from one have none");
  }
  if (IsBitwise(fold) && !IsInteger(wire)) {
    return refused(absl::StrCat(Name(wire), " has no integers"));
  }
  if (fold == Fold::kMean && IsInteger(wire)) {
    return refused(absl::StrCat("integers of type ", Name(wire), " have no mean"));
  }
  if (!IsDense(wire) && fold != Fold::kMean && fold != Fold::kNone) {
    return refused(absl::StrCat(Name(wire), " folds to the mean only"));
  }
  return absl::OkStatus();
}

std::string ToString(const Group& group) {
  std::string text = absl::StrCat("group ", group.id, " (");
  const char* separator = "";
  for (const GroupMember& member : group.members) {
    absl::StrAppend(&text, separator, "node ", member.node, " with ", member.workers,
                    member.workers == 1 ? " worker" : " workers");
    separator = ", ";
  }
  return absl::StrCat(text, "; window ", group.window_chunks, ")");
}

}  // namespace thalweg
