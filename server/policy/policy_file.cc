#include "server/policy/policy_file.h"

#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/base/log.h"
#include "server/base/text_file.h"
#include "server/policy/parse_policy.h"

namespace thalweg {
namespace {

constexpr Duration kReadInterval = std::chrono::seconds(1);

absl::StatusOr<std::string> ReadText(const std::string& path) {
  if (std::optional<std::string> text = ReadTextFile(path)) return *std::move(text);
  return absl::InvalidArgumentError(absl::StrCat("cannot read the policy '", path, "'"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PolicyFile>> PolicyFile::Open(const std::string& path) {
  THALWEG_ASSIGN_OR_RETURN(std::string text, ReadText(path));
  THALWEG_ASSIGN_OR_RETURN(Policy policy, ParsePolicy(text, path));
  return std::unique_ptr<PolicyFile>(new PolicyFile(path, std::move(text), std::move(policy)));
}

std::shared_ptr<const Policy> PolicyFile::Current() const {
  MutexLock lock(mutex_);
  return policy_;
}

void PolicyFile::Refresh(TimePoint now) {
  MutexLock lock(mutex_);
  if (now - last_read_ < kReadInterval) return;
  last_read_ = now;
  const absl::StatusOr<std::string> text = ReadText(path_);
  const std::string content = text.ok() ? *text : std::string(text.status().message());
  if (content == std::exchange(seen_, content)) return;
  const absl::StatusOr<Policy> policy = text.ok() ? ParsePolicy(*text, path_) : text.status();
  if (!policy.ok()) {
    spdlog::error("{}; the policy stays as it was", Text(policy.status()));
    return;
  }
  policy_ = std::make_shared<const Policy>(*policy);
  spdlog::info("the policy '{}' has changed: {} tenants", path_, policy->tenants.size());
}

}  // namespace thalweg
