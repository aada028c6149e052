#include "server/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "core/base/env.h"

namespace thalweg {

void InitLogging(const std::string& program) {
  auto logger = spdlog::stderr_color_mt(program);
  logger->set_pattern("%H:%M:%S.%e %^%l%$ %n: %v");
  const std::string wanted = GetEnv("THALWEG_LOG");
  const auto level = spdlog::level::from_str(wanted);
  const bool is_known = level != spdlog::level::off || wanted == "off";
  logger->set_level(is_known ? level : spdlog::level::info);
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  if (!is_known) {
    spdlog::warn(
        "THALWEG_LOG is '{}', expected trace, debug, info, warn, error or off: showing info",
        wanted);
  }
  for (const std::string& name : UnknownEnvVars()) {
    spdlog::warn("environment variable {} is not known and has no effect", name);
  }
}

std::string Text(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
}

}  // namespace thalweg
