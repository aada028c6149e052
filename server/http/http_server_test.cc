#include "server/http/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "httplib.h"
#include "server/http/prometheus_text.h"

namespace thalweg::http_server_test {
namespace {

using ::testing::HasSubstr;

// A Scrape is what a Prometheus server reads: each line is a comment or a sample of an announced
// family.
struct Scrape {
  std::map<std::string, std::string> types;
  std::map<std::string, double> samples;  // by name and labels, as written
};

// Returns the groups of POSIX extended `pattern` when it matches all of `line`; otherwise nothing.
std::vector<std::string> Match(const std::string& pattern, const std::string& line) {
  regex_t regex;
  EXPECT_EQ(regcomp(&regex, ("^" + pattern + "$").c_str(), REG_EXTENDED), 0);
  std::array<regmatch_t, 8> found;
  std::vector<std::string> groups;
  if (regexec(&regex, line.c_str(), found.size(), found.data(), 0) == 0) {
    for (const regmatch_t& group : found) {
      groups.push_back(group.rm_so < 0 ? "" : line.substr(group.rm_so, group.rm_eo - group.rm_so));
    }
  }
  regfree(&regex);
  return groups;
}

void Parse(const std::string& text, Scrape* scrape) {
  const std::string kName = "([a-zA-Z_:][a-zA-Z0-9_:]*)";
  const std::string kLabels = R"re((\{([a-zA-Z_][a-zA-Z0-9_]*="([^"\]|\\["\n])*",?)*\})?)re";
  ASSERT_TRUE(text.empty() || text.back() == '\n');
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!Match("# HELP " + kName + " .*", line).empty()) continue;
    if (const auto type = Match("# TYPE " + kName + " (counter|gauge)", line); !type.empty()) {
      ASSERT_TRUE(scrape->types.emplace(type[1], type[2]).second) << line;
      continue;
    }
    const auto sample = Match(kName + kLabels + " ([^ ]+)", line);
    ASSERT_FALSE(sample.empty()) << line;
    ASSERT_TRUE(scrape->types.contains(sample[1])) << line;
    ASSERT_TRUE(scrape->samples.emplace(sample[1] + sample[2], std::stod(sample[5])).second)
        << line;
  }
}

class HttpServerTest : public ::testing::Test {
 protected:
  virtual HttpHandler Pages() { return nullptr; }
  void SetUp() override {
    auto server =
        HttpServer::Start({.listen = "127.0.0.1:0"}, metrics_, [this] { return ready_; }, Pages());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    client_ = std::make_unique<httplib::Client>("http://" + server_->address());
  }

  MetricRegistry metrics_;
  absl::Status ready_;
  std::unique_ptr<HttpServer> server_;
  std::unique_ptr<httplib::Client> client_;
};

TEST_F(HttpServerTest, MetricsAreValidAndComplete) {
  metrics_.GetCounter("thalweg_rounds_total", "Rounds \"done\"", {{"job", "a"}}).Add(3);
  metrics_.GetCounter("thalweg_rounds_total", "", {{"job", "quote \" slash \\ line \n"}}).Add(4);
  metrics_.GetGauge("thalweg_nodes", "Nodes").Set(2.5);
  metrics_.GetGauge("thalweg_ratio", "Ratio").Set(std::numeric_limits<double>::quiet_NaN());
  const auto response = client_->Get("/metrics");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 200);
  EXPECT_THAT(response->get_header_value("Content-Type"), HasSubstr("text/plain; version=0.0.4"));
  Scrape scrape;
  ASSERT_NO_FATAL_FAILURE(Parse(response->body, &scrape));
  EXPECT_EQ(scrape.types["thalweg_rounds_total"], "counter");
  EXPECT_EQ(scrape.types["thalweg_nodes"], "gauge");
  EXPECT_EQ(scrape.samples.size(), 4u + 1);  // and the server's own
  EXPECT_EQ(scrape.samples["thalweg_rounds_total{job=\"a\"}"], 3);
  EXPECT_EQ(scrape.samples[R"(thalweg_rounds_total{job="quote \" slash \\ line \n"})"], 4);
  EXPECT_EQ(scrape.samples["thalweg_nodes"], 2.5);
  EXPECT_TRUE(std::isnan(scrape.samples["thalweg_ratio"]));
}

TEST_F(HttpServerTest, HistogramHasCumulativeBucketsASumAndACount) {
  Histogram& histogram = metrics_.GetHistogram("thalweg_wait_seconds", "Waits", {{"phase", "a"}});
  for (const double seconds : {0.0, 0.25, 0.25, 100.0}) histogram.Observe(seconds);
  const std::string text = PrometheusText(metrics_);
  EXPECT_THAT(text, HasSubstr("# TYPE thalweg_wait_seconds histogram\n"));
  for (const char* line :
       {"_count{phase=\"a\"} 4\n", "_sum{phase=\"a\"} 100.5\n",
        "_bucket{phase=\"a\",le=\"0.0001\"} 1\n", "_bucket{phase=\"a\",le=\"0.2048\"} 1\n",
        "_bucket{phase=\"a\",le=\"0.4096\"} 3\n", "_bucket{phase=\"a\",le=\"+Inf\"} 4\n"}) {
    EXPECT_THAT(text, HasSubstr(std::string("thalweg_wait_seconds") + line));
  }
}

TEST_F(HttpServerTest, LargeCountsKeepTheirDigits) {
  metrics_.GetCounter("thalweg_bytes_total", "Bytes").Add(9007199254740991.0);
  Scrape scrape;
  ASSERT_NO_FATAL_FAILURE(Parse(PrometheusText(metrics_), &scrape));
  EXPECT_EQ(scrape.samples["thalweg_bytes_total"], 9007199254740991.0);
}

TEST_F(HttpServerTest, NoMetricsIsAnEmptyPage) {
  MetricRegistry none;
  EXPECT_EQ(PrometheusText(none), "");
}

TEST_F(HttpServerTest, ReadinessSaysWhatIsMissing) {
  EXPECT_EQ(client_->Get("/readyz")->status, 200);
  ready_ = absl::UnavailableError("no aggregator at 10.0.0.1:7070");
  const auto response = client_->Get("/readyz");
  EXPECT_EQ(response->status, 503);
  EXPECT_THAT(response->body, HasSubstr("no aggregator at 10.0.0.1:7070"));
  EXPECT_EQ(client_->Get("/healthz")->status, 200);
}

TEST_F(HttpServerTest, OtherRequestsAreRefused) {
  EXPECT_EQ(client_->Get("/")->status, 404);
  for (const auto& refused :
       {client_->Post("/metrics", "", "text/plain"), client_->Post("/metrics", "x", "text/plain"),
        client_->Put("/none", "", "text/plain"), client_->Delete("/metrics"),
        client_->Options("/metrics")}) {
    EXPECT_EQ(refused->status, 405);
    EXPECT_EQ(refused->get_header_value("Allow"), "GET, HEAD");
  }
}

TEST_F(HttpServerTest, BodiesAreNotRead) {
  // Sockets hold some of these blocks, but not all.
  constexpr size_t kBlocks = 64;
  const std::string block(1 << 20, 'x');
  size_t written = 0;
  client_->Post(
      "/metrics",
      [&](size_t, httplib::DataSink& sink) {
        const bool sent = sink.write(block.data(), block.size());
        if (++written == kBlocks) sink.done();
        return sent;
      },
      "text/plain");
  EXPECT_LT(written, kBlocks);
  EXPECT_EQ(client_->Get("/healthz")->status, 200);
}

TEST_F(HttpServerTest, SeveralRangesOfAPageAreRefused) {
  metrics_.GetGauge("thalweg_nodes", "Nodes").Set(2.5);
  const auto range = [this](const char* value) {
    return client_->Get("/metrics", httplib::Headers{{"Range", value}});
  };
  EXPECT_EQ(range("bytes=0-")->body, client_->Get("/metrics")->body);
  EXPECT_EQ(range("bytes=0-,0-")->status, 416);
  EXPECT_EQ(range("bytes=0-,0-")->body, "");
}

TEST_F(HttpServerTest, BrowsersAreKeptFromOtherSites) {
  const auto response = client_->Get("/metrics");
  const std::string policy = response->get_header_value("Content-Security-Policy");
  EXPECT_THAT(policy, HasSubstr("default-src 'none'"));
  EXPECT_THAT(policy, HasSubstr("frame-ancestors 'none'"));
  EXPECT_EQ(policy.find("unsafe"), std::string::npos);
  EXPECT_EQ(response->get_header_value("X-Content-Type-Options"), "nosniff");
}

class HttpPagesTest : public HttpServerTest {
 protected:
  HttpHandler Pages() override {
    return [](const std::string& path) { return HttpReply{path == "/" ? 200 : 404, "a/b", path}; };
  }
};

TEST_F(HttpPagesTest, HandlerAnswersAllOtherPaths) {
  EXPECT_EQ(client_->Get("/")->status, 200);
  EXPECT_EQ(client_->Get("/")->get_header_value("Content-Type"), "a/b");
  EXPECT_EQ(client_->Get("/a%2Fb%20c?x=1")->body, "/a/b c");
  EXPECT_EQ(client_->Get("/a")->status, 404);
  EXPECT_EQ(client_->Get("/healthz")->body, "ok\n");
  EXPECT_EQ(client_->Head("/")->status, 200);
  EXPECT_EQ(client_->Head("/")->body, "");
  const std::string deep = "/" + std::string(8000, 'x');  // httplib answers longer paths with 414
  EXPECT_EQ(client_->Get(deep)->body, deep);
}

TEST_F(HttpPagesTest, ConnectionsAreNotKeptFromOthers) {
  client_->set_keep_alive(true);
  EXPECT_EQ(client_->Get("/")->get_header_value("Connection"), "close");
}

TEST_F(HttpPagesTest, NothingCanBeChanged) {
  EXPECT_EQ(client_->Post("/", "", "text/plain")->status, 405);
  EXPECT_EQ(client_->Delete("/api/v1/jobs/a")->status, 405);
}

TEST_F(HttpServerTest, TakenPortIsUnavailable) {
  const auto second =
      HttpServer::Start({.listen = server_->address()}, metrics_, [] { return absl::Status(); });
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_->address()));
}

TEST_F(HttpServerTest, StopsTwiceAndFreesThePort) {
  const std::string address = server_->address();
  server_->Stop();
  server_->Stop();
  EXPECT_FALSE(client_->Get("/healthz"));
  EXPECT_TRUE(HttpServer::Start({.listen = address}, metrics_, [] { return absl::Status(); }).ok());
}

}  // namespace
}  // namespace thalweg::http_server_test
