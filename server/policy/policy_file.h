// PolicyFile is a policy in a file, which may be replaced while the program runs.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/tenant.h"

namespace thalweg {

// A PolicyFile is thread-safe.
class PolicyFile {
 public:
  // InvalidArgument says that the file cannot be read, or what is wrong in which line.
  static absl::StatusOr<std::unique_ptr<PolicyFile>> Open(const std::string& path);

  // Returns the policy in force; never null.
  std::shared_ptr<const Policy> Current() const;

  // Reads the file again if it has not done so for a second. What is wrong with a new content is
  // logged once, and the policy in force stays.
  void Refresh(TimePoint now);

 private:
  PolicyFile(std::string path, std::string text, Policy policy)
      : path_(std::move(path)),
        policy_(std::make_shared<const Policy>(std::move(policy))),
        seen_(std::move(text)) {}

  const std::string path_;

  mutable Mutex mutex_;
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(mutex_);
  std::string seen_ ABSL_GUARDED_BY(mutex_);  // the latest content, or why it cannot be read
  TimePoint last_read_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
