// StepSettings holds the settings of optimizers' steps, as the nodes of a job announced them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "core/base/update.h"

namespace thalweg {

// Thread-compatible.
class StepSettings {
 public:
  // So many of a series are kept: rounds that are open together name few.
  static constexpr size_t kKept = 16 + kMaxAhead;
  // Numbers that differ from this bit on are of different series, each of which is kept for itself.
  static constexpr int kSeriesBit = 40;

  // Takes the settings that the node called `owner` has numbered. Those of the first node decide.
  // InvalidArgument: another node has announced others under that number (it is named, with the
  // first difference), the number is 0, or as Validate says. FailedPrecondition: the number is
  // older than those that are kept.
  absl::Status Set(const std::string& owner, uint64_t number, const UpdateStep& step);

  // Returns the settings; null: they have not been announced, or are no longer kept.
  std::shared_ptr<const UpdateStep> Find(uint64_t number) const;

 private:
  struct Entry {
    std::shared_ptr<const UpdateStep> step;
    std::string owner;
  };
  using Entries = std::map<uint64_t, Entry>;  // by number
  std::map<uint64_t, Entries> series_;
};

}  // namespace thalweg
