// These tests do to a server what strangers may do to it in large numbers: its threads, memory and
// descriptors must stay bounded, and a healthy node must be served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <future>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/thread.h"
#include "server/net/address.h"
#include "server/transport/channel_options.h"
#include "server/transport/guard/acceptor.h"
#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/control_service.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/shard/stream_set.h"
#include "server/transport/testing/raw_join.h"
#include "server/transport/testing/raw_stream.h"
#include "server/transport/testing/recording_shard.h"
#include "server/transport/wire/frame_codec.h"
#include "thalweg/v1/control.grpc.pb.h"

namespace thalweg::limits_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Duration kShort = std::chrono::seconds(1);
constexpr Duration kLonger = std::chrono::seconds(4);  // within which a peer must come so far
constexpr uint64_t kMostThreads = 64;

// Returns a number of /proc/self/status, such as "Threads:".
uint64_t OfProcess(const std::string& name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  uint64_t value = 0;
  while (status >> word) {
    if (word == name) status >> value;
  }
  return value;
}

// A CountingEvents keeps nothing, so that it can run for long.
class CountingEvents : public MemberEvents {
 public:
  void OnResult(RoundResult /*result*/) override {
    MutexLock lock(mutex_);
    ++results_;
    changed_.NotifyAll();
  }
  void OnFailed(absl::Status why) override { ADD_FAILURE() << why; }
  size_t results() {
    MutexLock lock(mutex_);
    return results_;
  }
  bool WaitFor(size_t results) {
    MutexLock lock(mutex_);
    return changed_.WaitUntil(
        mutex_, Now() + kTestPatience,
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return results_ >= results; });
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  size_t results_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A HealthyNode is a node that exchanges chunks without a pause until it is destroyed.
class HealthyNode {
 public:
  HealthyNode(const ShardServer& server, MetricRegistry& metrics)
      : shard_(RemoteShard::Create(server.address(), {}, metrics)) {
    auto member = shard_->Join(OfNode(1000), events_, Now() + kTestPatience);
    EXPECT_TRUE(member.ok()) << member.status();
    member_ = *std::move(member);
    thread_ = Thread("healthy", [this] { Exchange(); });
    ExpectServed();  // before others want a place for their streams
  }
  ~HealthyNode() {
    stopped_ = true;
    thread_.Join();
  }

  // Waits until another chunk has been exchanged from now on.
  void ExpectServed() { EXPECT_TRUE(events_->WaitFor(events_->results() + 2)); }

 private:
  void Exchange() {
    const auto data = std::make_shared<std::string>(16, 'x');
    for (uint32_t c = 0; !stopped_; ++c) {
      const Payload payload(std::as_bytes(std::span(*data)), data);
      ASSERT_TRUE(member_->Contribute({{{}, c, 1}, 5, WireFormat::kFloat32, 4, payload}).ok());
      ASSERT_TRUE(events_->WaitFor(c + 1));
    }
  }

  const std::unique_ptr<RemoteShard> shard_;
  const std::shared_ptr<CountingEvents> events_ = std::make_shared<CountingEvents>();
  std::unique_ptr<Member> member_;
  std::atomic<bool> stopped_{false};
  Thread thread_;
};

// An Idle is a TCP connection that sends nothing.
class Idle {
 public:
  Idle() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) { EXPECT_GE(socket_.fd(), 0); }
  // Connects from the host 127.0.0.`host`.
  void Connect(const ShardServer& server, uint32_t host = 1) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + host);
    EXPECT_EQ(bind(socket_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    address.sin_port = htons(static_cast<uint16_t>(ParseHostPort(server.address())->port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval patience{60, 0};
    setsockopt(socket_.fd(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    EXPECT_EQ(connect(socket_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  // Waits for the server's settings, or until it closes the connection.
  bool IsAccepted() {
    constexpr char kHello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0";  // and a 0
    if (send(socket_.fd(), kHello, sizeof kHello, MSG_NOSIGNAL) < 0) return false;
    char byte;
    return recv(socket_.fd(), &byte, 1, 0) == 1;
  }
  // Waits until the server closes the connection.
  bool IsClosed() {
    char bytes[256];
    ssize_t count;
    do {
      count = recv(socket_.fd(), bytes, sizeof bytes, 0);
    } while (count > 0);
    return count == 0 || errno == ECONNRESET;
  }

 private:
  Socket socket_;
};

class LimitsTest : public ::testing::Test {
 protected:
  std::unique_ptr<ShardServer> Start(ShardServer::Options options = {}) {
    options.listen = "127.0.0.1:0";
    auto server = ShardServer::Start(options, shard_, metrics_);
    EXPECT_TRUE(server.ok()) << server.status();
    return *std::move(server);
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
};

TEST_F(LimitsTest, WaitingJoinsOccupyNoThreads) {
  constexpr uint32_t kNodes = 200;
  struct Call {
    grpc::ClientContext context;
    v1::JoinResponse response;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::JoinResponse>> reader;
  };
  const auto server = Start();
  shard_.hold_joins = true;
  std::unique_ptr<v1::Control::Stub> stub;
  grpc::CompletionQueue queue;
  std::vector<Call> calls(kNodes);
  for (uint32_t node = 0; node < kNodes; ++node) {
    if (node % kMaxStreamsOfConnection == 0) {
      stub = v1::Control::NewStub(ForeignChannel(server->address()));
    }
    Call& call = calls[node];
    call.context.set_deadline(ToSystemTime(Now() + kTestPatience));
    call.reader = stub->AsyncJoin(&call.context, ProtoOfNode(node), &queue);
    call.reader->Finish(&call.response, &call.status, &call);
  }
  EXPECT_EQ(shard_.joins.WaitFor(kNodes).size(), kNodes);
  EXPECT_LE(OfProcess("Threads:"), kMostThreads);
  shard_.AnswerJoins();
  for (uint32_t node = 0; node < kNodes; ++node) {
    void* tag;
    bool ok;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_TRUE(static_cast<Call*>(tag)->status.ok());
  }
  EXPECT_TRUE(shard_.leaves.Get().empty());
}

TEST_F(LimitsTest, StoppingServerEndsTheJoinsThatWait) {
  const auto server = Start();
  shard_.hold_joins = true;
  grpc::Status status;
  {
    Thread joining("join", [&] {
      grpc::ClientContext context;
      context.set_deadline(ToSystemTime(Now() + kTestPatience));
      v1::JoinResponse response;
      status = v1::Control::NewStub(ForeignChannel(server->address()))
                   ->Join(&context, ProtoOfNode(0), &response);
    });
    EXPECT_EQ(shard_.joins.WaitFor(1).size(), 1u);
    server->Stop(Duration::zero());
  }
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(shard_.given_up.WaitFor(1).size(), 1u);
}

TEST_F(LimitsTest, LongCallsKeepNeitherHeartbeatsNorGradientsWaiting) {
  constexpr uint32_t kCalls = ControlService::kThreads + 1;
  const auto server = Start();
  HealthyNode healthy(*server, metrics_);
  Recorder<bool> release;
  shard_.on_register = [&] { release.WaitFor(1); };
  {
    const auto remote = RemoteShard::Create(server->address(), {}, metrics_);
    const auto node =
        remote->Join(OfNode(1), std::make_shared<CountingEvents>(), Now() + kTestPatience);
    ASSERT_TRUE(node.ok()) << node.status();
    std::vector<Thread> threads;
    for (uint32_t i = 0; i < kCalls; ++i) {
      threads.emplace_back("register",
                           [&] { EXPECT_TRUE((*node)->Register({}, Now() + kTestPatience).ok()); });
    }
    EXPECT_EQ(shard_.buckets.WaitFor(ControlService::kThreads).size(), ControlService::kThreads);
    EXPECT_TRUE((*node)->Heartbeat(Now() + kTestPatience).ok());
    healthy.ExpectServed();
    release.Add(true);
  }
  EXPECT_EQ(shard_.buckets.Get().size(), kCalls);
}

TEST_F(LimitsTest, StreamsAndCallsThatAreResetAtOnceTakeNoThreads) {
  const auto server = Start();
  const auto attacker = ForeignChannel(server->address());
  HealthyNode healthy(*server, metrics_);
  for (int i = 0; i < 5000; ++i) {
    RawStream(attacker, GRPC_COMPRESS_NONE,
              i % 2 == 0 ? "/thalweg.v1.Exchange/Stream" : "/thalweg.v1.Control/Join");
  }
  EXPECT_LE(OfProcess("Threads:"), kMostThreads);
  healthy.ExpectServed();
}

TEST_F(LimitsTest, NodeThatReadsNothingLosesItsStream) {
  const auto server = Start({.patience = kLonger});
  const auto data = std::make_shared<std::string>(16 << 20, 'x');
  const Payload payload(std::as_bytes(std::span(*data)), data);
  for (const bool job_fails : {false, true}) {
    const auto channel = ForeignChannel(server->address());
    const size_t leaves_before = shard_.leaves.Get().size();
    const SessionToken token = JoinedToken(channel, 0);
    RawStream stream(channel);
    ASSERT_TRUE(stream.Write(EncodeOpen({token})));
    ASSERT_NO_FATAL_FAILURE(AwaitOpened(stream, shard_));
    const auto node = shard_.nodes.Get().back();
    for (uint32_t i = 0; i < 8; ++i) node->OnResult(ResultOf(i, payload));
    if (job_fails) node->OnFailed(absl::AbortedError("node 1 is gone"));
    const auto leaves = shard_.leaves.WaitFor(leaves_before + 1);
    ASSERT_EQ(leaves.size(), leaves_before + 1);
    EXPECT_EQ(leaves.back().second.code(), absl::StatusCode::kUnavailable);
  }
}

TEST_F(LimitsTest, StreamWhosePeerDoesNotSayWhoItIsEnds) {
  const auto server = Start({.patience = kShort});
  RawStream stream(ForeignChannel(server->address()));
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
}

// Reads residuals, and receives none.
class UnreceivedReads {
 public:
  UnreceivedReads(const ShardServer& server, RecordingShard& shard)
      : attacker_(grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(),
                                            Arguments())) {
    shard.residual_answer = std::vector<float>(1 << 20);
    v1::ReadResidualRequest request;
    request.set_token(JoinedToken(attacker_, 0));
    for (uint32_t i = 0; i < ControlService::kMaxReads + 4; ++i) {
      calls_.push_back(std::make_unique<RawStream>(attacker_, GRPC_COMPRESS_NONE,
                                                   "/thalweg.v1.Control/ReadResidual"));
      EXPECT_TRUE(calls_.back()->Write(Buffer(request.SerializeAsString())));
      EXPECT_TRUE(calls_.back()->WritesDone());
    }
    shard.residual_reads.WaitFor(kMost);
  }

  // All callers are at one address, which may have half of the places.
  static constexpr size_t kMost = ControlService::kMaxReads / 2;

 private:
  // Without them, gRPC would take a residual although nobody reads it.
  static grpc::ChannelArguments Arguments() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    return arguments;
  }

  const std::shared_ptr<grpc::Channel> attacker_;
  std::vector<std::unique_ptr<RawStream>> calls_;
};

TEST_F(LimitsTest, ResidualsThatNobodyReceivesAreFew) {
  const auto server = Start();
  const UnreceivedReads unreceived(*server, shard_);
  const auto remote = RemoteShard::Create(server->address(), {}, metrics_);
  const TimePoint deadline = Now() + kTestPatience;
  const auto node = remote->Join(OfNode(1), std::make_shared<CountingEvents>(), deadline);
  ASSERT_TRUE(node.ok()) << node.status();
  EXPECT_FALSE((*node)->ReadResidual({}, 0, Now() + kShort).ok());
  EXPECT_EQ(shard_.residual_reads.Get().size(), UnreceivedReads::kMost);
}

TEST_F(LimitsTest, ReaderWaitsUntilResidualsThatNobodyReceivesAreForgotten) {
  const auto server = Start({.patience = kShort});
  const UnreceivedReads unreceived(*server, shard_);
  const auto remote = RemoteShard::Create(server->address(), {}, metrics_);
  const TimePoint deadline = Now() + kTestPatience;
  const auto node = remote->Join(OfNode(1), std::make_shared<CountingEvents>(), deadline);
  ASSERT_TRUE(node.ok()) << node.status();
  const absl::Status read = (*node)->ReadResidual({}, 0, deadline).status();
  EXPECT_TRUE(read.ok()) << read;
}

TEST_F(LimitsTest, SnapshotsThatAreRestoredLeaveThreadsForOthers) {
  std::promise<void> restored;
  shard_.on_snapshots = [end = restored.get_future().share()] { end.wait_for(kTestPatience); };
  const auto server = Start();
  const auto remote = RemoteShard::Create(server->address(), {}, metrics_);
  const TimePoint deadline = Now() + kTestPatience;
  const auto node = remote->Join(OfNode(1), std::make_shared<CountingEvents>(), deadline);
  ASSERT_TRUE(node.ok()) << node.status();
  std::vector<std::future<absl::Status>> restores;
  for (uint32_t i = 0; i < ControlService::kThreads; ++i) {
    restores.push_back(std::async(std::launch::async, [&] {
      return (*node)->Snapshots({SnapshotAction::kRestore, {0, 1}}, deadline).status();
    }));
  }
  shard_.snapshot_calls.WaitFor(1);
  EXPECT_TRUE((*node)->MakeGroup({}, deadline).ok());
  EXPECT_LE(shard_.snapshot_calls.Get().size(), ControlService::kMaxRestores);
  restored.set_value();
  for (auto& restore : restores) EXPECT_TRUE(restore.get().ok());
}

TEST_F(LimitsTest, ConnectionWithoutACallOrStreamIsClosed) {
  const auto server = Start({.idle = kLonger});
  HealthyNode healthy(*server, metrics_);
  Idle idle;
  idle.Connect(*server);
  EXPECT_TRUE(idle.IsAccepted());
  EXPECT_TRUE(idle.IsClosed());
  healthy.ExpectServed();
}

TEST_F(LimitsTest, IdleConnectionsDoNoHarm) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_cur < 4096) GTEST_SKIP() << "the process may open too few descriptors";
  const auto server = Start();
  HealthyNode healthy(*server, metrics_);
  std::vector<Idle> idle(1000);
  for (Idle& connection : idle) connection.Connect(*server);
  EXPECT_TRUE(idle.back().IsAccepted());
  healthy.ExpectServed();
  EXPECT_LE(OfProcess("Threads:"), kMostThreads);
}

TEST_F(LimitsTest, ConnectionsBeyondTheLimitAreClosedUntilOthersEnd) {
  constexpr size_t kRoom = 10;
  constexpr size_t kAttempts = 50;
  std::vector<Idle> idle(kAttempts);
  const auto next = static_cast<uint32_t>(Socket(::socket(AF_INET, SOCK_STREAM, 0)).fd());
  const auto server = Start({.max_descriptor = next + 20 + uint32_t{kRoom}});
  HealthyNode healthy(*server, metrics_);
  for (Idle& connection : idle) connection.Connect(*server);
  size_t accepted = 0;
  for (Idle& connection : idle) accepted += connection.IsAccepted() ? 1 : 0;
  EXPECT_GE(accepted, 1u);
  EXPECT_LE(accepted, 20 + kRoom);
  EXPECT_EQ(metrics_.GetCounter("thalweg_grpc_refused_connections_total", "").Value(),
            static_cast<double>(kAttempts - accepted));
  healthy.ExpectServed();
  idle.clear();
  EXPECT_TRUE(
      ForeignChannel(server->address())->WaitForConnected(ToSystemTime(Now() + kTestPatience)));
}

TEST_F(LimitsTest, ConnectionsAreFewWhereMemoryIsLittleUntilOthersEnd) {
  constexpr size_t kRoom = 8;
  // One host has half of the places.
  const auto server = Start({.memory_bytes = 2 * (kRoom + 1) * (384 << 10)});
  HealthyNode healthy(*server, metrics_);
  std::vector<Idle> idle(3 * kRoom);
  for (Idle& connection : idle) connection.Connect(*server);
  size_t accepted = 0;
  for (Idle& connection : idle) accepted += connection.IsAccepted() ? 1 : 0;
  EXPECT_EQ(accepted, kRoom);
  Idle elsewhere;
  elsewhere.Connect(*server, 2);
  EXPECT_TRUE(elsewhere.IsAccepted());
  healthy.ExpectServed();
  idle.clear();
  EXPECT_TRUE(
      ForeignChannel(server->address())->WaitForConnected(ToSystemTime(Now() + kTestPatience)));
}

TEST_F(LimitsTest, RefusedConnectionIsLoggedWithItsHostTheNumbersAndWhatToDo) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "captured", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  {
    const auto server = Start({.memory_bytes = 4 * (384 << 10)});
    std::vector<Idle> idle(4);
    idle[0].Connect(*server, 2);
    EXPECT_TRUE(idle[0].IsAccepted());
    for (size_t i = 1; i < idle.size(); ++i) idle[i].Connect(*server, 7);
    for (size_t i = 1; i < idle.size(); ++i) EXPECT_EQ(idle[i].IsAccepted(), i == 1) << i;
  }
  spdlog::set_default_logger(before);
  EXPECT_THAT(log.str(), AllOf(HasSubstr("refused a connection from 127.0.0.7:"),
                               HasSubstr("of 4 that may be open, its host or network has 1 and "
                                         "others have 1"),
                               HasSubstr("raise --memory-limit")));
}

TEST_F(LimitsTest, StreamsThatDoNotSayWhoTheyAreAreFewForAllConnectionsTogether) {
  const auto server = Start({.patience = 2 * kTestPatience});
  HealthyNode healthy(*server, metrics_);
  constexpr uint32_t kMost = StreamSet::kMaxUnopened / 2;  // all callers are at one address
  constexpr uint32_t kEach = kMaxStreamsOfConnection - 1;
  std::vector<std::unique_ptr<RawStream>> streams;
  while (streams.size() < kMost) {
    const auto channel = ForeignChannel(server->address());
    for (uint32_t i = 0; i < kEach && streams.size() < kMost; ++i) {
      streams.push_back(std::make_unique<RawStream>(channel));
    }
    grpc::ClientContext context;  // an answer shows that the server has read what came before
    v1::ProbeResponse response;
    EXPECT_TRUE(v1::Control::NewStub(channel)->Probe(&context, {}, &response).ok());
  }
  EXPECT_EQ(RawStream(ForeignChannel(server->address())).Finish().error_code(),
            grpc::StatusCode::CANCELLED);
  healthy.ExpectServed();
}

TEST_F(LimitsTest, ConnectionsAreAcceptedAgainAfterDescriptorsHaveRunOut) {
  const auto server = Start();
  HealthyNode healthy(*server, metrics_);
  std::vector<Idle> idle(20);
  const auto next = static_cast<rlim_t>(Socket(::socket(AF_INET, SOCK_STREAM, 0)).fd());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit full{next, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &full), 0);
  for (Idle& connection : idle) connection.Connect(*server);
  healthy.ExpectServed();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  for (Idle& connection : idle) EXPECT_TRUE(connection.IsAccepted());
}

}  // namespace
}  // namespace thalweg::limits_test
