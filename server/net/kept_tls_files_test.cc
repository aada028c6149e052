#include "server/net/kept_tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "server/net/test_certificates.h"

namespace thalweg::kept_tls_files_test {
namespace {

using ::testing::HasSubstr;

std::string TextOf(const std::string& path) {
  return {std::istreambuf_iterator<char>(std::ifstream(path).rdbuf()), {}};
}

class KeptTlsFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto kept = KeptTlsFiles::Open(files_);
    ASSERT_TRUE(kept.ok()) << kept.status();
    kept_ = *std::move(kept);
  }
  // Time passes as the test says.
  void Look() { kept_->Refresh(now_ += std::chrono::seconds(1)); }
  absl::Time Expiry() const {
    const auto expiry = EarliestExpiry(kept_->copies().cert);
    EXPECT_TRUE(expiry.ok()) << expiry.status();
    return expiry.value_or(absl::InfinitePast());
  }
  bool CanServe() const { return CheckTlsFiles(kept_->copies()).ok(); }

  const TestCa ca_;
  const TlsFiles files_ = ca_.Issue("shard", absl::Hours(2));
  std::unique_ptr<KeptTlsFiles> kept_;
  TimePoint now_ = TimePoint(std::chrono::hours(1));
};

TEST_F(KeptTlsFilesTest, CopiesAreWhatTheFilesHave) {
  EXPECT_TRUE(CanServe());
  EXPECT_THAT(TextOf(kept_->copies().cert), HasSubstr(TextOf(files_.cert)));
  EXPECT_THAT(TextOf(kept_->copies().key), HasSubstr(TextOf(files_.key)));
  EXPECT_EQ(TextOf(kept_->copies().ca), TextOf(files_.ca));
}

TEST_F(KeptTlsFilesTest, CopiesFollowWhatIsAsGoodUnderTheSamePaths) {
  const absl::Time before = Expiry();
  const TlsFiles copies = kept_->copies();
  ca_.Issue("shard", absl::Hours(12));
  Look();
  EXPECT_GT(Expiry(), before + absl::Hours(9));
  EXPECT_EQ(kept_->copies().cert, copies.cert);
  EXPECT_TRUE(CanServe());
}

TEST_F(KeptTlsFilesTest, CopiesStayWhileTheFilesCannotBeServedWith) {
  const absl::Time before = Expiry();
  const std::string key = TextOf(files_.key);
  for (const std::string& path : {files_.cert, files_.key, files_.ca}) {
    const std::string whole = TextOf(path);
    for (const std::string& text : {std::string(), std::string("no PEM"), whole.substr(0, 100)}) {
      std::ofstream(path) << text;
      for (int i = 0; i < 3; ++i) Look();
      EXPECT_TRUE(CanServe()) << path << ": " << text;
    }
    std::filesystem::remove(path);
    Look();
    EXPECT_TRUE(CanServe()) << path;
    std::filesystem::create_directory(path);
    Look();
    EXPECT_TRUE(CanServe()) << path;
    std::filesystem::remove(path);
    std::ofstream(path) << whole;
  }
  ca_.Issue("other");
  std::ofstream(files_.key) << TextOf(ca_.folder() + "/other.key");  // of another certificate
  Look();
  EXPECT_TRUE(CanServe());
  EXPECT_EQ(Expiry(), before);
  ca_.Issue("shard", absl::Hours(12));
  Look();
  EXPECT_GT(Expiry(), before + absl::Hours(9));
}

TEST_F(KeptTlsFilesTest, WhatIsWrongIsSaidOnceAndNotWhileFilesAreReplaced) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  const std::string key = TextOf(files_.key);
  std::ofstream(files_.key) << "";
  Look();
  EXPECT_EQ(log.str(), "");
  for (int i = 0; i < 3; ++i) Look();
  std::ofstream(files_.key) << key;
  Look();
  spdlog::set_default_logger(before);
  const std::string said = "'" + files_.key + "': expected a private key in PEM";
  EXPECT_THAT(log.str(), HasSubstr(said));
  EXPECT_EQ(log.str().find(said), log.str().rfind(said));
}

TEST_F(KeptTlsFilesTest, FilesAreReadOnceASecond) {
  Look();
  const absl::Time before = Expiry();
  ca_.Issue("shard", absl::Hours(12));
  kept_->Refresh(now_ + std::chrono::milliseconds(999));
  EXPECT_EQ(Expiry(), before);
}

TEST(KeptTlsFilesWithoutTest, WithoutFilesThereAreNoCopies) {
  const auto kept = KeptTlsFiles::Open({});
  ASSERT_TRUE(kept.ok()) << kept.status();
  (*kept)->Refresh(TimePoint(std::chrono::hours(1)));
  EXPECT_FALSE((*kept)->copies().enabled());
}

TEST(KeptTlsFilesWithoutTest, WrongFilesAreRefusedByName) {
  const TlsFiles files = TestCa().Issue("shard");
  const absl::Status status = KeptTlsFiles::Open({files.cert, "/none.key", files.ca}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace thalweg::kept_tls_files_test
