// These tests check over mutual TLS which certificates may join and use which memberships, and that
// connections without a good certificate are counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "server/aggregator/aggregator.h"
#include "server/net/test_certificates.h"
#include "server/transport/credentials.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/known_member.h"
#include "server/transport/testing/raw_join.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"
#include "server/transport/wire/control_codec.h"
#include "server/transport/wire/frame_codec.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg::tenants_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Spiffe(const std::string& id) { return "IP:127.0.0.1,URI:spiffe://test/" + id; }

JoinRequest Request(const std::string& job) {
  JoinRequest request;
  request.job = job;
  request.workers = 1;
  request.num_nodes = 1;
  request.world_size = 1;
  request.num_shards = 1;
  request.round_timeout = kTestPatience;
  return request;
}

std::shared_ptr<const Policy> TwoTenants() {
  return std::make_shared<const Policy>(
      Policy{{{.name = "a", .spiffe_ids = {"spiffe://test/a/*"}, .jobs = {"a-*"}},
              {.name = "b", .dns_names = {"*.b.example"}, .jobs = {"b-*"}}}});
}

// A shard with a policy for tenants a and b, and its log.
class TenantsTest : public ::testing::Test {
 protected:
  TenantsTest() {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("captured", log_));
    auto server = ShardServer::Start({.listen = "127.0.0.1:0", .tls = ca_.Issue("shard")},
                                     aggregator_, metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~TenantsTest() override {
    server_.reset();  // its threads log
    spdlog::set_default_logger(before_);
  }

  std::unique_ptr<RemoteShard> Node(const TlsFiles& files) {
    return RemoteShard::Create(server_->address(), {.channels = 1, .tls = files}, metrics_);
  }
  absl::StatusOr<std::unique_ptr<Member>> Join(Shard& node, const std::string& job) {
    return node.Join(Request(job), std::make_shared<RecordingEvents>(), Now() + kTestPatience);
  }
  // Joins with the certificate and returns the membership's token.
  SessionToken TokenOf(const TlsFiles& files, const std::string& job) {
    SessionToken token = 0;
    const grpc::Status joined =
        RawJoin(Channel(MakeChannelCredentials(files)), ToProto(Request(job)), &token);
    EXPECT_TRUE(joined.ok()) << joined.error_message();
    return token;
  }
  // Uses a membership with the certificate.
  grpc::Status Heartbeat(const TlsFiles& files, SessionToken token) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(Now() + kTestPatience));
    v1::HeartbeatRequest request;
    request.set_token(token);
    v1::HeartbeatResponse response;
    return v1::Control::NewStub(Channel(MakeChannelCredentials(files)))
        ->Heartbeat(&context, request, &response);
  }
  std::shared_ptr<grpc::Channel> Channel(
      const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    return grpc::CreateCustomChannel(server_->address(), credentials, ClientArguments());
  }
  double Refused(const std::string& reason) {
    return metrics_.GetCounter("thalweg_shard_refused_total", "", {{"reason", reason}}).Value();
  }
  double FailedHandshakes() {
    return metrics_.GetCounter("thalweg_grpc_handshakes_failed_total", "").Value();
  }
  size_t LogLines(const std::string& text) const {
    const std::vector<std::string> lines = log_->last_formatted();
    return std::count_if(lines.begin(), lines.end(), [&text](const std::string& line) {
      return absl::StrContains(line, text);
    });
  }
  // Connects; the shard must refuse each handshake, count it, and log a line with `words`.
  void ExpectNoConnection(const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                          const std::string& words) {
    {
      // The channel makes one attempt, or more where this thread is late by a second.
      const auto channel = Channel(credentials);
      grpc::ClientContext context;
      context.set_deadline(ToSystemTime(Now() + kTestPatience));
      v1::HeartbeatResponse response;
      const grpc::Status status = v1::Control::NewStub(channel)->Heartbeat(&context, {}, &response);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
    }
    // With TLS 1.3 the client may learn of it before the shard has logged it.
    const TimePoint deadline = Now() + kTestPatience;
    const auto each_is_logged = [&] {
      const size_t lines = LogLines(words);
      return lines > 0 && FailedHandshakes() == static_cast<double>(lines);
    };
    while (!each_is_logged() && Now() < deadline) std::this_thread::yield();
    EXPECT_TRUE(each_is_logged()) << FailedHandshakes() << " failed handshakes, "
                                  << absl::StrJoin(log_->last_formatted(), "");
  }

  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  const std::shared_ptr<spdlog::sinks::ringbuffer_sink_mt> log_ =
      std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(1000);
  const TestCa ca_;
  MetricRegistry metrics_;
  Aggregator aggregator_{{.policy = TwoTenants}, metrics_};
  std::unique_ptr<ShardServer> server_;
};

TEST_F(TenantsTest, TenantsJoinTheirOwnJobs) {
  const auto a = Node(ca_.IssueWith("one", Spiffe("a/host")));
  const auto b = Node(ca_.IssueWith("two", "IP:127.0.0.1,DNS:x,DNS:host.b.example"));
  const auto of_a = Join(*a, "a-1");
  const auto of_b = Join(*b, "b-1");
  ASSERT_TRUE(of_a.ok()) << of_a.status();
  ASSERT_TRUE(of_b.ok()) << of_b.status();
  EXPECT_TRUE((*of_a)->Heartbeat(Now() + kTestPatience).ok());
  EXPECT_TRUE((*of_b)->Heartbeat(Now() + kTestPatience).ok());
}

TEST_F(TenantsTest, MembershipBelongsToItsCertificatesPrincipal) {
  const TlsFiles a = ca_.IssueWith("one", Spiffe("a/host"));
  const TlsFiles b = ca_.IssueWith("two", "IP:127.0.0.1,DNS:x,DNS:host.b.example");
  const SessionToken of_a = TokenOf(a, "a-1");
  const SessionToken of_b = TokenOf(b, "b-1");
  EXPECT_TRUE(Heartbeat(a, of_a).ok());
  EXPECT_TRUE(Heartbeat(b, of_b).ok());
  EXPECT_THAT(Heartbeat(b, of_a).error_message(),
              AllOf(HasSubstr("belongs to certificate 'spiffe://test/a/host'"),
                    HasSubstr("the caller has 'DNS:x'")));
  EXPECT_THAT(Heartbeat(a, of_b).error_message(),
              AllOf(HasSubstr("belongs to certificate 'DNS:x'"),
                    HasSubstr("the caller has 'spiffe://test/a/host'")));
}

TEST_F(TenantsTest, AnotherTenantsJobIsRefusedLoggedOnceAndCounted) {
  const auto node = Node(ca_.IssueWith("one", Spiffe("a/host")));
  const absl::Status status = Join(*node, "b-1").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("job 'b-1'"), HasSubstr("certificate 'spiffe://test/a/host'"),
                    HasSubstr("tenant 'a'"), HasSubstr("'a-*' only")));
  EXPECT_EQ(Refused("job"), 1);
  EXPECT_EQ(LogLines("spiffe://test/a/host"), 1u);
  EXPECT_EQ(aggregator_.num_jobs(), 0u);
}

TEST_F(TenantsTest, NamesOfAnotherKindDoNotCount) {
  const auto node = Node(ca_.Issue("host.b.example"));  // its common name
  EXPECT_EQ(Join(*node, "b-1").status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Refused("certificate"), 1);
}

TEST_F(TenantsTest, RenewedCertificateOfTheSameNameUsesTheMembership) {
  const SessionToken token = TokenOf(ca_.IssueWith("one", Spiffe("a/host")), "a-1");
  const grpc::Status renewed = Heartbeat(ca_.IssueWith("two", Spiffe("a/host")), token);
  EXPECT_TRUE(renewed.ok()) << renewed.error_message();
}

// A thief has a good certificate of the owner's tenant, and the owner's token.
class OtherCertificateTest : public TenantsTest {
 protected:
  void SetUp() override {
    auto owner = KnownMember::Join(
        Channel(MakeChannelCredentials(ca_.IssueWith("owner", Spiffe("a/owner")))), Request("a-1"),
        events_, metrics_);
    ASSERT_TRUE(owner.ok()) << owner.status();
    owner_ = *std::move(owner);
  }
  void ExpectRefused(const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(status.error_message(), AllOf(HasSubstr("certificate 'spiffe://test/a/owner'"),
                                              HasSubstr("'spiffe://test/a/thief'")));
    EXPECT_EQ(Refused("token"), ++refused_);
    EXPECT_TRUE(owner_->member().Heartbeat(Now() + kTestPatience).ok());
    EXPECT_TRUE(events_->failures.Get().empty());
  }
  template <typename Request, typename Response>
  void ExpectCallRefused(grpc::Status (v1::Control::Stub::*call)(grpc::ClientContext*,
                                                                 const Request&, Response*)) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(Now() + kTestPatience));
    Request request;
    request.set_token(owner_->token());
    Response response;
    ExpectRefused((stub_.get()->*call)(&context, request, &response));
  }

  const std::shared_ptr<RecordingEvents> events_ = std::make_shared<RecordingEvents>();
  std::unique_ptr<KnownMember> owner_;
  const std::shared_ptr<grpc::Channel> channel_ =
      Channel(MakeChannelCredentials(ca_.IssueWith("thief", Spiffe("a/thief"))));
  const std::unique_ptr<v1::Control::Stub> stub_ = v1::Control::NewStub(channel_);
  int refused_ = 0;
};

TEST_F(OtherCertificateTest, NoCallIsTaken) {
  ExpectCallRefused(&v1::Control::Stub::Heartbeat);
  ExpectCallRefused(&v1::Control::Stub::RegisterBucket);
  ExpectCallRefused(&v1::Control::Stub::ReadResidual);
  ExpectCallRefused(&v1::Control::Stub::WriteResidual);
  ExpectCallRefused(&v1::Control::Stub::SetSettings);
  ExpectCallRefused(&v1::Control::Stub::ReadWeights);
  ExpectCallRefused(&v1::Control::Stub::WriteWeights);
  ExpectCallRefused(&v1::Control::Stub::Snapshots);
  ExpectCallRefused(&v1::Control::Stub::Leave);
}

TEST_F(OtherCertificateTest, NoStreamIsTaken) {
  RawStream stream(channel_);
  // A later incarnation would take the owner's stream's place.
  ASSERT_TRUE(
      stream.Write(EncodeOpen({.token = owner_->token(), .num_streams = 1, .incarnation = 7})));
  ExpectRefused(stream.Finish());
}

TEST_F(TenantsTest, ClientWithoutACertificateIsRefusedCountedAndLogged) {
  std::ifstream file(ca_.folder() + "/ca.crt");
  grpc::SslCredentialsOptions options;
  options.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
  ExpectNoConnection(grpc::SslCredentials(options), "peer did not return a certificate");
}

TEST_F(TenantsTest, ClientOfAnotherCaIsRefusedCountedAndLogged) {
  const TestCa other;
  TlsFiles files = other.IssueWith("node", Spiffe("a/host"));
  files.ca = ca_.folder() + "/ca.crt";
  ExpectNoConnection(MakeChannelCredentials(files), "Handshake failed");
}

TEST_F(TenantsTest, ClientWhoseCertificateHasExpiredIsRefusedCountedAndLogged) {
  ExpectNoConnection(MakeChannelCredentials(ca_.Issue("late", -absl::Minutes(1))),
                     "certificate verify failed");
}

TEST_F(TenantsTest, ClientWithoutTlsIsCountedAndLogged) {
  ExpectNoConnection(grpc::InsecureChannelCredentials(), "wrong version number");
}

}  // namespace
}  // namespace thalweg::tenants_test
