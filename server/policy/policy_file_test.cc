#include "server/policy/policy_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace thalweg::policy_file_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

std::string TextFor(const std::string& tenant) {
  return absl::StrCat("tenant { name: \"", tenant, "\" common_name: \"x\" job: \"*\" }\n");
}

class PolicyFileTest : public ::testing::Test {
 protected:
  PolicyFileTest() {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
    Write(TextFor("first"));
    auto file = PolicyFile::Open(path_);
    EXPECT_TRUE(file.ok()) << file.status();
    file_ = *std::move(file);
    file_->Refresh(begin_);
  }
  ~PolicyFileTest() override {
    spdlog::set_default_logger(before_);
    std::filesystem::remove(path_);
  }

  void Write(const std::string& text) { std::ofstream(path_) << text; }
  std::string TenantAt(TimePoint now) {
    file_->Refresh(now);
    return file_->Current()->tenants[0].name;
  }

  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream log_;
  const std::string path_ = absl::StrCat(::testing::TempDir(), "/policy-", getpid());
  std::unique_ptr<PolicyFile> file_;
  const TimePoint begin_ = Now();
};

TEST_F(PolicyFileTest, ReplacedFileCountsWithinASecond) {
  Write(TextFor("second"));
  EXPECT_EQ(TenantAt(begin_ + milliseconds(999)), "first");
  EXPECT_EQ(TenantAt(begin_ + seconds(1)), "second");
}

TEST_F(PolicyFileTest, BadNewFileKeepsTheOldPolicyAndIsToldOnce) {
  Write(TextFor("second") + "tenant {");
  for (int i = 1; i < 4; ++i) EXPECT_EQ(TenantAt(begin_ + seconds(i)), "first");
  std::string log = log_.str();
  EXPECT_THAT(log, HasSubstr(path_ + ":2:"));
  EXPECT_THAT(log, HasSubstr("stays as it was"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1);
  std::filesystem::remove(path_);
  for (int i = 4; i < 7; ++i) EXPECT_EQ(TenantAt(begin_ + seconds(i)), "first");
  log = log_.str();
  EXPECT_THAT(log, HasSubstr("cannot read the policy"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 2);
  Write(TextFor("second"));
  EXPECT_EQ(TenantAt(begin_ + seconds(7)), "second");
}

TEST_F(PolicyFileTest, FileThatCannotBeReadIsAnErrorAtTheStart) {
  const auto missing = PolicyFile::Open(path_ + ".missing");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr(path_ + ".missing"));
  EXPECT_FALSE(PolicyFile::Open(::testing::TempDir()).ok());
}

}  // namespace
}  // namespace thalweg::policy_file_test
