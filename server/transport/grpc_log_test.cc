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

#include "server/base/log_limit.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg::grpc_log_test {
namespace {

using ::testing::HasSubstr;

// Returns what is logged meanwhile.
template <typename Act>
std::string LogOf(const Act& act) {
  std::ostringstream text;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
  RouteGrpcLog();
  act();
  spdlog::set_default_logger(before);
  return text.str();
}

void ExpectBounded(const std::string& log) {
  const auto lines = std::count(log.begin(), log.end(), '\n');
  EXPECT_GE(lines, 1);
  // The messages may fall into two minutes.
  EXPECT_LE(lines, 2 * LogLimit::kLinesPerMinute + 1);
}

TEST(GrpcLogTest, ErrorsAreOursOnOneLineEachAndBounded) {
  const std::string log = LogOf([] {
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);  // gRPC's default, once it is initialised
    for (int i = 0; i < 1000; ++i) gpr_log(GPR_ERROR, "a stranger\nsays %d", i);
  });
  EXPECT_THAT(log, HasSubstr("gRPC: a stranger\\nsays 0"));
  ExpectBounded(log);
}

TEST(GrpcLogTest, ComplaintsOfProtobufAboutPeersAreOursAndBounded) {
  ::testing::internal::CaptureStderr();
  const std::string log = LogOf([] {
    for (int i = 0; i < 1000; ++i) EXPECT_FALSE(v1::Failure().ParseFromString("\x12\x01\xff"));
  });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(log, HasSubstr("protobuf: "));
  ExpectBounded(log);
}

}  // namespace
}  // namespace thalweg::grpc_log_test
