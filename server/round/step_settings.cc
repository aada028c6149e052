#include "server/round/step_settings.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// Returns e.g. "lr 0.1 of group 2, host1 0.2"; requires that the steps differ.
std::string Difference(const UpdateStep& ours, const std::string& owner, const UpdateStep& theirs) {
  if (ours.groups.size() != theirs.groups.size()) {
    return absl::StrCat(theirs.groups.size(), " groups, ", owner, " with ", ours.groups.size());
  }
  constexpr std::pair<const char*, double UpdateStep::*> kOfAll[] = {
      {"grad_scale", &UpdateStep::grad_scale},
      {"max_grad_norm", &UpdateStep::max_grad_norm},
      {"grad_squares", &UpdateStep::grad_squares}};
  if (ours.groups == theirs.groups) {
    for (const auto& [name, member] : kOfAll) {
      if (ours.*member == theirs.*member) continue;
      return absl::StrCat(name, " ", theirs.*member, ", ", owner, " with ", ours.*member);
    }
    return "others";
  }
  const auto [our, their] =
      std::mismatch(ours.groups.begin(), ours.groups.end(), theirs.groups.begin());
  constexpr std::pair<const char*, double GroupStep::*> kNames[] = {
      {"lr", &GroupStep::lr},
      {"weight_decay", &GroupStep::weight_decay},
      {"momentum", &GroupStep::momentum},
      {"dampening", &GroupStep::dampening},
      {"beta1", &GroupStep::beta1},
      {"beta2", &GroupStep::beta2},
      {"eps", &GroupStep::eps},
      {"trust_ratio", &GroupStep::trust_ratio}};
  for (const auto& [name, member] : kNames) {
    if ((*our).*member == (*their).*member) continue;
    return absl::StrCat(name, " ", (*their).*member, " of group ", our - ours.groups.begin(), ", ",
                        owner, " with ", (*our).*member);
  }
  return "others";
}

}  // namespace

absl::Status StepSettings::Set(const std::string& owner, uint64_t number, const UpdateStep& step) {
  THALWEG_RETURN_IF_ERROR(Validate(step));
  if (number == 0) return absl::InvalidArgumentError("settings are numbered from 1, got 0");
  Entries& entries = series_[number >> kSeriesBit];
  if (const auto known = entries.find(number); known != entries.end()) {
    const Entry& first = known->second;
    if (*first.step == step) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(owner, " gives settings ", number, " with ",
                                                   Difference(*first.step, first.owner, step)));
  }
  if (entries.size() == kKept && number < entries.begin()->first) {
    return absl::FailedPreconditionError(absl::StrCat(owner, " gives settings ", number,
                                                      ", but the oldest that are kept are ",
                                                      entries.begin()->first));
  }
  entries[number] = {std::make_shared<const UpdateStep>(step), owner};
  if (entries.size() > kKept) entries.erase(entries.begin());
  return absl::OkStatus();
}

std::shared_ptr<const UpdateStep> StepSettings::Find(uint64_t number) const {
  const auto series = series_.find(number >> kSeriesBit);
  if (series == series_.end()) return nullptr;
  const auto found = series->second.find(number);
  return found == series->second.end() ? nullptr : found->second.step;
}

}  // namespace thalweg
