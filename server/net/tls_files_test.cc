#include "server/net/tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "server/net/test_certificates.h"

namespace thalweg::tls_files_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

std::string Refusal(const TlsFiles& files) {
  const absl::Status status = CheckTlsFiles(files);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

double Exported(const MetricRegistry& metrics, const std::string& certificate) {
  for (const auto& family : metrics.Snapshot()) {
    if (family.name != "thalweg_tls_certificate_expiry_timestamp_seconds") continue;
    for (const auto& sample : family.samples) {
      if (sample.labels.at("certificate") == certificate) return sample.value;
    }
  }
  ADD_FAILURE() << "nothing is exported for " << certificate;
  return 0;
}

TEST(TlsFilesTest, NoneOrThreeThatFitAreAccepted) {
  const TestCa ca;
  EXPECT_TRUE(CheckTlsFiles({}).ok());
  EXPECT_FALSE(TlsFiles().enabled());
  const TlsFiles files = ca.Issue("shard");
  EXPECT_TRUE(CheckTlsFiles(files).ok()) << CheckTlsFiles(files);
  EXPECT_TRUE(files.enabled());
}

TEST(TlsFilesTest, SomeOfTheThreeAreRefusedNamingWhatIsMissing) {
  const TlsFiles files = TestCa().Issue("shard");
  EXPECT_THAT(Refusal({"", files.key, files.ca}), HasSubstr("no certificate"));
  EXPECT_THAT(Refusal({files.cert, "", files.ca}), HasSubstr("no key"));
  EXPECT_THAT(Refusal({files.cert, files.key, ""}), HasSubstr("no CA"));
}

TEST(TlsFilesTest, FilesThatCannotServeAreRefusedByName) {
  const TestCa ca;
  const TlsFiles files = ca.Issue("shard");
  EXPECT_THAT(Refusal({"/none.crt", files.key, files.ca}), HasSubstr("cannot read '/none.crt'"));
  EXPECT_THAT(Refusal({files.cert, "/none.key", files.ca}), HasSubstr("cannot read '/none.key'"));
  EXPECT_THAT(Refusal({files.cert, files.key, "/none.ca"}), HasSubstr("cannot read '/none.ca'"));
  EXPECT_THAT(Refusal({files.key, files.key, files.ca}),
              AllOf(HasSubstr(files.key), HasSubstr("expected certificates in PEM, got none")));
  EXPECT_THAT(Refusal({files.cert, files.cert, files.ca}), HasSubstr("expected a private key"));
  EXPECT_THAT(Refusal({files.cert, ca.Issue("other").key, files.ca}),
              HasSubstr("other.key' is not the key of the certificate"));
  std::ofstream(files.ca, std::ios::app) << "-----BEGIN CERTIFICATE-----\nAAAA\n";
  EXPECT_THAT(Refusal(files), HasSubstr("one that cannot be read"));
}

TEST(TlsFilesTest, ExpiredCertificateIsRefusedWithItsDates) {
  const TestCa ca;
  const auto last = [] {
    const absl::Time time = absl::Now() - absl::Minutes(30);
    return absl::FormatTime("%Y-%m-%dT%H:%M", time, absl::UTCTimeZone());
  };
  const std::string before = last();
  const TlsFiles files = ca.Issue("shard", absl::Minutes(-30));
  const std::string after = last();
  EXPECT_THAT(Refusal(files),
              AllOf(HasSubstr("has expired"), AnyOf(HasSubstr(before), HasSubstr(after))));
}

TEST(TlsFilesTest, ExpiryIsThatOfTheFirstCertificateToExpire) {
  const TestCa ca;
  const std::string longer = ca.Issue("longer", absl::Hours(9)).cert;
  std::ofstream(longer, std::ios::app)
      << std::ifstream(ca.Issue("shorter", absl::Hours(2)).cert).rdbuf();
  const auto expiry = EarliestExpiry(longer);
  ASSERT_TRUE(expiry.ok()) << expiry.status();
  EXPECT_LT(absl::AbsDuration(*expiry - absl::Now() - absl::Hours(2)), absl::Minutes(5));
}

TEST(TlsFilesTest, ExpiryFollowsTheFilesAndSurvivesABrokenOne) {
  const TestCa ca;
  const TlsFiles files = ca.Issue("shard", absl::Hours(2));
  MetricRegistry metrics;
  CertificateExpiry expiry(files, metrics);
  const double before = Exported(metrics, "own");
  EXPECT_NEAR(before, static_cast<double>(absl::ToUnixSeconds(absl::Now())) + 7200, 300);
  EXPECT_NEAR(Exported(metrics, "ca"), before + 46 * 3600, 300);
  ca.Issue("shard", absl::Hours(12));
  expiry.Refresh();
  const double after = Exported(metrics, "own");
  EXPECT_NEAR(after, before + 10 * 3600, 300);
  std::ofstream(files.cert) << "no certificate";
  expiry.Refresh();
  EXPECT_EQ(Exported(metrics, "own"), after);
}

}  // namespace
}  // namespace thalweg::tls_files_test
