#include "server/transport/grpc_log.h"

#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>

#include "core/base/log_limit.h"

namespace thalweg {
namespace {

TEST(GrpcLogTest, ErrorsAreOursOnOneLineEachAndBounded) {
  std::ostringstream text;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
  RouteGrpcLog();
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);  // gRPC's default, once it is initialised
  for (int i = 0; i < 1000; ++i) gpr_log(GPR_ERROR, "a stranger\nsays %d", i);
  spdlog::set_default_logger(before);
  const std::string log = text.str();
  EXPECT_THAT(log, ::testing::HasSubstr("gRPC: a stranger\\nsays 0"));
  const auto lines = std::count(log.begin(), log.end(), '\n');
  EXPECT_GE(lines, 1);
  // The messages may fall into two minutes.
  EXPECT_LE(lines, 2 * LogLimit::kLinesPerMinute + 1);
}

}  // namespace
}  // namespace thalweg
