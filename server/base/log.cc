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
  logger->set_level(level == spdlog::level::off && wanted != "off" ? spdlog::level::info : level);
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  for (const std::string& name : UnknownEnvVars()) {
    spdlog::warn("environment variable {} is not known and has no effect", name);
  }
}

std::string Text(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
}

}  // namespace thalweg
