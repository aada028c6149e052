// These tests cover which nodes a shard with a policy takes, and how much their tenants may use.
#include "server/aggregator/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/protocol.h"
#include "core/base/testing/test_patience.h"
#include "core/base/thread.h"
#include "server/aggregator/aggregator.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::admission_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint32_t kWindow = 8;
// What a job of one node reserves: its own, its window, and the results.
const uint64_t kJobBytes = OwnBytes(1) + 2 * kWindow * uint64_t{kMinChunkBytes};

JoinRequest Request(const std::string& job, const std::string& common_name, uint32_t node = 0,
                    uint32_t num_nodes = 1) {
  JoinRequest request;
  request.job = job;
  request.node = node;
  request.num_nodes = num_nodes;
  request.workers = 1;
  request.world_size = num_nodes;
  request.num_shards = 1;
  request.chunk_bytes = kMinChunkBytes;
  request.window_chunks = kWindow;
  request.round_timeout = kTestPatience;
  if (!common_name.empty()) request.peer = PeerNames{.common_name = common_name};
  return request;
}

class AdmissionTest : public ::testing::Test {
 protected:
  AdmissionTest() {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
    Tenant a{.name = "a", .common_names = {"a-*"}, .jobs = {"a-*", "both"}};
    Tenant b{.name = "b", .common_names = {"b-*"}, .jobs = {"b-*", "both"}};
    policy_ = std::make_shared<const Policy>(Policy{{a, b}});
  }
  ~AdmissionTest() override { spdlog::set_default_logger(before_); }

  // Joins until the test ends.
  absl::StatusOr<Member*> Join(const JoinRequest& request) {
    auto member = shard_.Join(request, std::make_shared<ListSink>(), Now() + kTestPatience);
    if (!member.ok()) return member.status();
    MutexLock lock(mutex_);
    members_.push_back(*std::move(member));
    return members_.back().get();
  }
  // Gives tenant a these quotas from now on.
  void SetQuotas(std::optional<uint32_t> jobs, std::optional<uint64_t> bytes) {
    Policy policy = *policy_;
    policy.tenants[0].max_jobs = jobs;
    policy.tenants[0].max_memory_bytes = bytes;
    policy_ = std::make_shared<const Policy>(policy);
  }
  void ExpectRefused(const JoinRequest& request, absl::StatusCode code, const std::string& text) {
    const size_t jobs_before = shard_.num_jobs();
    const absl::Status status = Join(request).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_EQ(shard_.num_jobs(), jobs_before);
    EXPECT_THAT(log_.str(), HasSubstr(text));
  }
  double Refused(const std::string& reason) {
    return registry_.GetCounter("thalweg_shard_refused_total", "", {{"reason", reason}}).Value();
  }
  double Reserved(const std::string& tenant) {
    return registry_
        .GetGauge("thalweg_shard_tenant_memory_reserved_bytes", "", {{"tenant", tenant}})
        .Value();
  }

  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream log_;
  MetricRegistry registry_;
  std::shared_ptr<const Policy> policy_;
  Aggregator shard_{{.memory_bytes = 10 * kJobBytes, .policy = [this] { return policy_; }},
                    registry_};
  Mutex mutex_;
  std::vector<std::unique_ptr<Member>> members_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(AdmissionTest, TenantJoinsItsOwnJobsAndNoOthers) {
  const auto member = Join(Request("a-1", "a-host"));
  ASSERT_TRUE(member.ok()) << member.status();
  EXPECT_TRUE(shard_.HasPolicy());
  ExpectRefused(Request("a-1", "b-host", 0, 2), absl::StatusCode::kPermissionDenied,
                "job 'a-1': certificate 'CN=b-host' belongs to tenant 'b', which may take part in "
                "jobs 'b-*', 'both' only");
  EXPECT_EQ(Refused("job"), 1);
  const std::string log = log_.str();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
  EXPECT_TRUE((*member)->Heartbeat(Now()).ok());
}

TEST_F(AdmissionTest, CertificateOfNobodyJoinsNothing) {
  ExpectRefused(Request("a-1", "c-host"), absl::StatusCode::kPermissionDenied,
                "certificate 'CN=c-host' belongs to none of the tenants");
  JoinRequest nameless = Request("a-1", "");
  nameless.peer = PeerNames{};
  ExpectRefused(nameless, absl::StatusCode::kPermissionDenied, "certificate has no name");
  EXPECT_EQ(Refused("certificate"), 2);
}

TEST_F(AdmissionTest, NamesCannotForgeLinesOfTheLog) {
  ExpectRefused(Request("a-1", "c\nx"), absl::StatusCode::kPermissionDenied, "CN=c\\nx");
}

TEST_F(AdmissionTest, JobOfATenantTakesNoNodesOfAnother) {
  absl::StatusOr<Member*> first = absl::UnknownError("");
  {
    Thread node("node 0", [&] { first = Join(Request("both", "a-host", 0, 2)); });
    while (shard_.num_jobs() == 0) std::this_thread::yield();
    ExpectRefused(Request("both", "b-host", 1, 2), absl::StatusCode::kPermissionDenied,
                  "job 'both' belongs to tenant 'a', and the node's certificate to tenant 'b'");
    EXPECT_TRUE(Join(Request("both", "a-other", 1, 2)).ok());
  }
  EXPECT_TRUE(first.ok()) << first.status();
}

TEST_F(AdmissionTest, NodeInThisProcessIsBelievedAndItsJobIsItsPeers) {
  absl::StatusOr<Member*> own = absl::UnknownError("");
  {
    Thread node("own node", [&] { own = Join(Request("both", "", 0, 2)); });
    while (shard_.num_jobs() == 0) std::this_thread::yield();
    EXPECT_TRUE(Join(Request("both", "b-host", 1, 2)).ok());
  }
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_GT(Reserved("b"), 0);
}

TEST_F(AdmissionTest, TenantHasAtMostItsQuotaOfJobsAtATimeWhileOthersGoOn) {
  SetQuotas(2, std::nullopt);
  const auto first = Join(Request("a-1", "a-host"));
  ASSERT_TRUE(first.ok() && Join(Request("a-2", "a-other")).ok());
  ExpectRefused(Request("a-3", "a-host"), absl::StatusCode::kResourceExhausted,
                "job 'a-3': tenant 'a' has 2 jobs on this shard, and its quota is 2 at a time");
  EXPECT_EQ(Refused("quota"), 1);
  EXPECT_TRUE(Join(Request("b-1", "b-host")).ok());
  (*first)->Leave(absl::OkStatus());
  EXPECT_TRUE(Join(Request("a-3", "a-host")).ok());
}

TEST_F(AdmissionTest, TenantsJobsReserveAtMostItsQuotaOfMemoryWhileOthersGoOn) {
  SetQuotas(std::nullopt, kJobBytes);
  const auto first = Join(Request("a-1", "a-host"));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(Reserved("a"), kJobBytes);
  const absl::Status refused = Join(Request("a-2", "a-host")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("job 'a-2'"), HasSubstr("needs "),
                    HasSubstr(absl::StrCat("0 of the quota of tenant 'a' of ", kJobBytes))));
  EXPECT_TRUE(Join(Request("b-1", "b-host")).ok());
  EXPECT_EQ(Reserved("a"), kJobBytes);
  EXPECT_EQ(Reserved("b"), kJobBytes);
  (*first)->Leave(absl::OkStatus());
  EXPECT_EQ(Reserved("a"), 0);
  EXPECT_TRUE(Join(Request("a-3", "a-host")).ok());
}

TEST_F(AdmissionTest, ChangedPolicyCountsForNewNodesAndOldOnesStay) {
  const auto old = Join(Request("a-1", "a-host"));
  ASSERT_TRUE(old.ok()) << old.status();
  SetQuotas(1, kJobBytes / 2);
  ExpectRefused(Request("a-2", "a-host"), absl::StatusCode::kResourceExhausted, "quota is 1");
  SetQuotas(2, kJobBytes / 2);
  EXPECT_THAT(std::string(Join(Request("a-2", "a-host")).status().message()),
              HasSubstr(absl::StrCat("0 of the quota of tenant 'a' of ", kJobBytes / 2)));
  EXPECT_TRUE((*old)->Heartbeat(Now()).ok());
}

TEST(NoPolicyTest, EverybodyJoinsEverything) {
  MetricRegistry registry;
  Aggregator shard({}, registry);
  const auto member =
      shard.Join(Request("a-1", "c-host"), std::make_shared<ListSink>(), Now() + kTestPatience);
  ASSERT_TRUE(member.ok()) << member.status();
  EXPECT_FALSE(shard.HasPolicy());
}

}  // namespace
}  // namespace thalweg::admission_test
