// These tests cover the HTTP port behind TLS and a token.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "httplib.h"
#include "server/http/http_server.h"
#include "server/net/test_certificates.h"

namespace thalweg::https_server_test {
namespace {

using ::testing::HasSubstr;

class HttpsServerTest : public ::testing::Test {
 protected:
  void Start(const HttpServer::Options& options) {
    auto server = HttpServer::Start(
        options, metrics_, [] { return absl::OkStatus(); },
        [](const std::string& path) { return HttpReply{200, "text/plain", path}; });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  void StartTls() { Start({.listen = "127.0.0.1:0", .tls = files_}); }

  std::unique_ptr<httplib::Client> Client(const std::string& ca) {
    auto client = std::make_unique<httplib::Client>(server_->scheme() + "://" + server_->address());
    client->set_ca_cert_path(ca.c_str());
    return client;
  }

  const TestCa ca_;
  const TlsFiles files_ = ca_.Issue("shard");
  MetricRegistry metrics_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpsServerTest, ClientsThatTrustTheCaAreAnswered) {
  ASSERT_NO_FATAL_FAILURE(StartTls());
  const auto page = Client(files_.ca)->Get("/page");
  ASSERT_TRUE(page) << httplib::to_string(page.error());
  EXPECT_EQ(page->body, "/page");
}

TEST_F(HttpsServerTest, ClientsOfAnotherCaRefuseIt) {
  ASSERT_NO_FATAL_FAILURE(StartTls());
  const TestCa other;
  EXPECT_EQ(Client(other.Issue("x").ca)->Get("/").error(), httplib::Error::SSLServerVerification);
}

TEST_F(HttpsServerTest, PlainRequestsAreNotAnswered) {
  ASSERT_NO_FATAL_FAILURE(StartTls());
  EXPECT_FALSE(httplib::Client("http://" + server_->address()).Get("/healthz"));
  EXPECT_TRUE(Client(files_.ca)->Get("/healthz"));
}

TEST_F(HttpsServerTest, ReplacedCertificateIsShownToTheNextConnection) {
  ASSERT_NO_FATAL_FAILURE(StartTls());
  const TestCa other;
  const TlsFiles replacement = other.Issue("shard");
  std::filesystem::copy_file(replacement.cert, files_.cert,
                             std::filesystem::copy_options::overwrite_existing);
  std::filesystem::copy_file(replacement.key, files_.key,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(Client(replacement.ca)->Get("/"));
  EXPECT_FALSE(Client(files_.ca)->Get("/"));
}

TEST_F(HttpsServerTest, ScrapeSaysWhenCertificatesExpireNow) {
  ASSERT_NO_FATAL_FAILURE(StartTls());
  const auto expires_in = [&] {
    const std::string name =
        R"(thalweg_tls_certificate_expiry_timestamp_seconds{certificate="own"} )";
    const std::string text = Client(files_.ca)->Get("/metrics")->body;
    const size_t found = text.find(name);
    if (found == std::string::npos) return -1.0;
    return std::stod(text.substr(found + name.size())) -
           absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  };
  constexpr double kTestTime = 300;
  EXPECT_NEAR(expires_in(), 3600, kTestTime);
  ca_.Issue("shard", absl::Hours(100));
  EXPECT_NEAR(expires_in(), 360'000, kTestTime);
}

TEST_F(HttpsServerTest, TokenIsWantedForAllButProbes) {
  const std::string path = ca_.folder() + "/token";
  std::ofstream(path) << "s3cret\n";
  ASSERT_NO_FATAL_FAILURE(Start({.listen = "127.0.0.1:0", .token_file = path}));
  const auto client = Client("");
  for (const char* page : {"/metrics", "/", "/api/v1/jobs"}) {
    const auto refused = client->Get(page);
    EXPECT_EQ(refused->status, 401) << page;
    EXPECT_THAT(refused->get_header_value("WWW-Authenticate"), HasSubstr("Basic"));
    EXPECT_THAT(refused->body, HasSubstr("token"));
    EXPECT_EQ(client->Get(page, {{"Authorization", "Bearer s3cret"}})->status, 200) << page;
  }
  EXPECT_EQ(client->Get("/healthz")->status, 200);
  EXPECT_EQ(client->Get("/readyz")->status, 200);
  client->set_basic_auth("anne", "s3cret");
  EXPECT_EQ(client->Get("/")->status, 200);

  std::ofstream(path) << "another";
  EXPECT_EQ(client->Get("/")->status, 401);
  std::filesystem::remove(path);
  EXPECT_EQ(client->Get("/")->status, 401);
}

TEST_F(HttpsServerTest, TokenFileWithoutATokenIsRefused) {
  const auto refused = HttpServer::Start({.listen = "127.0.0.1:0", .token_file = "/none"}, metrics_,
                                         [] { return absl::OkStatus(); });
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace thalweg::https_server_test
