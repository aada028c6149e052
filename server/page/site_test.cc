#include "server/page/site.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"

namespace thalweg::site_test {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr double kStarted = 1'700'000'000.25;
// 2^53 - 1, the largest consecutive integer in a double
constexpr double kManyBytes = 9'007'199'254'740'991;

JobReport TwoNodes() {
  JobReport job;
  job.name = "team/resnet 50%";
  job.state = JobReport::State::kRunning;
  job.codec = "powersgd:rank=4";
  job.world_size = 8;
  job.shard = 1;
  job.num_shards = 2;
  job.link = {.bytes_per_second = 125e6, .round_trip = std::chrono::microseconds(200)};
  job.memory_reserved_bytes = 600;
  job.rounds_completed = 11;
  job.rounds_lost = 2;
  job.received = {kManyBytes, 5};
  job.sent = {7, 8};
  job.formats = {{WireFormat::kFloat16, true, {4, 1}}};
  job.nodes.resize(2);
  job.nodes[0] = {"host0 <b>", NodeReport::State::kActive,     4, std::chrono::milliseconds(1500),
                  9,           std::chrono::milliseconds(250), 3};
  job.waiting = {{{2, 0, 1}, 3, 12}, std::chrono::seconds(4), {1}};
  return job;
}

class SiteTest : public ::testing::Test {
 protected:
  Json Get(const std::string& path, int status = 200) {
    const HttpReply reply = site_.Answer(path);
    EXPECT_EQ(reply.status, status);
    EXPECT_EQ(reply.type, "application/json");
    return Json::parse(reply.body);
  }

  SiteTest() {
    report_.uptime = std::chrono::seconds(90);
    report_.jobs = {TwoNodes()};
  }

  ShardReport report_;
  std::vector<JobFlights> flights_;
  Site site_{{[this] { return report_; }, [this] { return flights_; }}, kStarted};
  const Site sidecar_{{nullptr, [this] { return flights_; }}, kStarted};  // without a shard
};

TEST_F(SiteTest, EveryAnswerSaysWhatTheShardSpeaksAndWhatItsClockSays) {
  for (const char* path : {"/api/v1/shard", "/api/v1/jobs", "/api/v1/jobs/team/resnet 50%"}) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const Json answer = Get(path);
    EXPECT_EQ(answer["wire_version"], kWireVersion);
    // A wrong unit would be years off; the bound is wide because the clock may be set while a test
    // runs.
    EXPECT_NEAR(answer["unix_seconds"].get<double>(), std::chrono::duration<double>(now).count(),
                3600);
  }
}

TEST_F(SiteTest, JobsCarryTheirStateInUnitsOfTheirNames) {
  const Json answer = Get("/api/v1/jobs");
  EXPECT_EQ(answer["started_unix_seconds"], kStarted);
  EXPECT_EQ(answer["uptime_seconds"], 90);
  ASSERT_EQ(answer["jobs"].size(), 1u);
  const Json& job = answer["jobs"][0];
  EXPECT_EQ(job["state"], "running");
  EXPECT_EQ(job["codec"], "powersgd:rank=4");
  EXPECT_EQ(job["rounds"], 11);
  EXPECT_EQ(job["rounds_lost"], 2);
  EXPECT_EQ(job["memory_reserved_bytes"], 600);
  EXPECT_EQ(job["link_round_trip_seconds"], 200e-6);
  EXPECT_EQ(job["received"], (Json{{"raw_bytes", kManyBytes}, {"wire_bytes", 5}}));
  EXPECT_EQ(job["formats"][0]["format"], "fp16");
  EXPECT_EQ(job["formats"][0]["factors"], true);
  EXPECT_EQ(job["waiting"]["nodes"], Json::array({1}));
  EXPECT_EQ(job["waiting"]["seconds"], 4);
  const Json node = {{"node", 0},
                     {"name", "host0 <b>"},
                     {"state", "active"},
                     {"workers", 4},
                     {"silent_seconds", 1.5},
                     {"last_rounds", 9},
                     {"waited_seconds", 0.25},
                     {"reconnections", 3}};
  EXPECT_EQ(job["nodes"][0], node);
  EXPECT_EQ(job["nodes"][1]["state"], "missing");
}

TEST_F(SiteTest, PlacementIsToldByTheFirstShardInPartsOfOne) {
  EXPECT_TRUE(Get("/api/v1/jobs")["jobs"][0]["placement"].is_null());
  ShareForecast forecast;
  forecast.seconds_per_byte = 1.5e-8;
  forecast.ring_seconds_per_byte = 1e-8;
  report_.jobs[0].placement = {{kShareTotal / 4, 3 * (kShareTotal / 4)}, forecast, "in words"};
  const Json placement = {{"shares", {0.25, 0.75}},
                          {"seconds_per_byte", 1.5e-8},
                          {"ring_seconds_per_byte", 1e-8},
                          {"text", "in words"}};
  EXPECT_EQ(Get("/api/v1/jobs")["jobs"][0]["placement"], placement);
}

TEST_F(SiteTest, OneJobIsTheSameAsAmongAll) {
  EXPECT_EQ(Get("/api/v1/jobs/team/resnet 50%")["job"], Get("/api/v1/jobs")["jobs"][0]);
}

TEST_F(SiteTest, ListOfJobsHasTheBeginningOfALongPolicy) {
  const std::string policy(60'000, 'p');
  report_.jobs[0].codec = policy;
  EXPECT_EQ(Get("/api/v1/jobs")["jobs"][0]["codec"], policy.substr(0, 1024) + "…");
  EXPECT_EQ(Get("/api/v1/jobs/team/resnet 50%")["job"]["codec"], policy);
}

TEST_F(SiteTest, JobsOfOneNameAreAllListedAndTheOldestIsShownByName) {
  report_.jobs.resize(3, report_.jobs[0]);
  for (int i = 0; i < 3; ++i) {
    report_.jobs[i].identity = absl::StrCat("a", i);
    report_.jobs[i].age = std::chrono::seconds(i == 1 ? 9 : i);
  }
  const Json all = Get("/api/v1/jobs")["jobs"];
  ASSERT_EQ(all.size(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(all[i]["identity"], absl::StrCat("a", i));
  EXPECT_EQ(Get("/api/v1/jobs/team/resnet 50%")["job"]["identity"], "a1");
}

TEST_F(SiteTest, CollectivesSayHowFarTheyHaveCome) {
  using std::chrono::milliseconds;
  flights_ = {{"team/resnet",
               1,
               {{"allreduce 7 of group 'default'",
                 "mean of 4 elements of fp32",
                 {{2, milliseconds(1500)}, {3, milliseconds(250)}},
                 milliseconds(200),
                 std::nullopt}}}};
  const Json expected = Json::parse(R"([{"name": "team/resnet", "node": 1, "collectives": [{
    "name": "allreduce 7 of group 'default'", "what": "mean of 4 elements of fp32",
    "came": [{"rank": 2, "seconds_ago": 1.5}, {"rank": 3, "seconds_ago": 0.25}],
    "sent_seconds_ago": 0.2, "done_seconds_ago": null}]}])");
  EXPECT_EQ(Get("/api/v1/collectives")["jobs"], expected);
}

TEST_F(SiteTest, SidecarWithoutAShardHasItsCollectivesOnly) {
  EXPECT_EQ(sidecar_.Answer("/api/v1/collectives").status, 200);
  for (const char* path : {"/", "/api/v1/shard", "/api/v1/jobs/vgg"}) {
    const HttpReply reply = sidecar_.Answer(path);
    EXPECT_EQ(reply.status, 404);
    EXPECT_THAT(reply.body, HasSubstr("/api/v1/collectives"));
    EXPECT_EQ(reply.body.find("/api/v1/jobs,"), std::string::npos);
  }
}

TEST_F(SiteTest, UnknownJobIsNotFoundByName) {
  EXPECT_THAT(Get("/api/v1/jobs/vgg", 404)["error"], HasSubstr("no job 'vgg'"));
}

TEST_F(SiteTest, UnknownPathsSayWhatThereIs) {
  EXPECT_THAT(Get("/api/v1/", 404)["error"], HasSubstr("jobs/NAME"));
  EXPECT_THAT(Get("/api/v1/jobs/", 404)["error"], HasSubstr("jobs/NAME"));
  EXPECT_THAT(Get("/api/v2/jobs", 404)["error"], HasSubstr("/api/v1/jobs"));
  EXPECT_THAT(Get("", 404)["error"], HasSubstr("/metrics"));
  EXPECT_THAT(Get("/../page.css", 404)["error"], HasSubstr("no page"));
}

TEST_F(SiteTest, ShardSaysWhatWentWrong) {
  report_.reasons = {{absl::StatusCode::kDeadlineExceeded, 1, 2, 3}};
  report_.faults = {{"job", absl::StatusCode::kDeadlineExceeded, "waited 24 s for node 1", false, 3,
                     std::chrono::seconds(5)}};
  report_.memory_budget_bytes = 1000;
  report_.memory_reserved_bytes = 700;
  const Json answer = Get("/api/v1/shard");
  EXPECT_EQ(answer["jobs"], 1);
  EXPECT_EQ(answer["memory_budget_bytes"], 1000);
  EXPECT_EQ(answer["memory_reserved_bytes"], 700);
  EXPECT_EQ(answer["reasons"][0]["reason"], "DEADLINE_EXCEEDED");
  EXPECT_EQ(answer["reasons"][0]["nodes_refused"], 2);
  const Json& fault = answer["faults"][0];
  EXPECT_EQ(fault["kind"], "failed");
  EXPECT_EQ(fault["seconds_ago"], 5);
  EXPECT_EQ(fault["rounds_lost"], 3);
}

TEST_F(SiteTest, TextThatIsNotUtf8StaysValidJson) {
  report_.jobs[0].failure = "cut \xE2\x80";
  EXPECT_THAT(Get("/api/v1/jobs")["jobs"][0]["failure"], HasSubstr("cut "));
}

TEST_F(SiteTest, PageComesWithItsPartsAndNothingFromElsewhere) {
  const HttpReply page = site_.Answer("/");
  EXPECT_EQ(page.type, "text/html; charset=utf-8");
  EXPECT_THAT(page.body, HasSubstr("<!doctype html>"));
  for (const char* part :
       {"/page.css", "/page.js", "/job.js", "/rates.js", "/chart.js", "/icon.svg"}) {
    EXPECT_THAT(page.body + site_.Answer("/page.js").body + site_.Answer("/job.js").body,
                HasSubstr(part + 1));
    EXPECT_EQ(site_.Answer(part).status, 200);
    EXPECT_EQ(site_.Answer(part).body.find("https://"), std::string::npos);
  }
  EXPECT_EQ(site_.Answer("/page.css").type, "text/css; charset=utf-8");
}

}  // namespace
}  // namespace thalweg::site_test
