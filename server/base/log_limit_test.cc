#include "server/base/log_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <memory>
#include <sstream>

namespace thalweg::log_limit_test {
namespace {

TEST(LogLimitTest, EachMinuteHasItsLinesAndTheRestIsCounted) {
  std::ostringstream text;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
  LogLimit limit("of a test");
  const TimePoint begin = Now();
  uint32_t admitted = 0;
  for (uint32_t i = 0; i < LogLimit::kLinesPerMinute + 7; ++i) {
    admitted += limit.Admits(begin + std::chrono::milliseconds(i)) ? 1 : 0;
  }
  EXPECT_EQ(admitted, LogLimit::kLinesPerMinute);
  EXPECT_FALSE(limit.Admits(begin + std::chrono::seconds(59)));
  EXPECT_EQ(text.str(), "");
  EXPECT_TRUE(limit.Admits(begin + std::chrono::seconds(60)));
  EXPECT_THAT(text.str(), ::testing::HasSubstr("8 more messages of a test were left out"));
  text.str("");
  EXPECT_TRUE(limit.Admits(begin + std::chrono::seconds(180)));
  EXPECT_EQ(text.str(), "");
  spdlog::set_default_logger(before);
}

}  // namespace
}  // namespace thalweg::log_limit_test
