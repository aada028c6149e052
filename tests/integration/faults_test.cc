// These tests inject faults between workers and sidecars: every worker must soon get a clear error,
// and nothing may hang.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <utility>
#include <variant>
#include <vector>

#include "client/core/hello.h"
#include "core/ipc/connection.h"
#include "tests/integration/cluster.h"
#include "tests/integration/forwarding_shard.h"
#include "tests/integration/reordering_shard.h"

#if defined(__SANITIZE_THREAD__)
#define THALWEG_TSAN 1
#endif

namespace thalweg::faults_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const BucketLayout kLayout{DType::kFloat32, {{"w", {2000}}}};
const std::vector<float> kOnes(2000, 1.0f);
// A worker waits for so long. The layers below give up at eight and nine tenths of it, and must do
// so in this order on a busy machine, too.
constexpr Duration kLayered = std::chrono::seconds(15);

std::span<const std::byte> Gradient() { return std::as_bytes(std::span(kOnes)); }

template <typename T>
std::string Message(const absl::StatusOr<T>& result) {
  return std::string(result.status().message());
}

TEST(WorkerFaultTest, DifferentTensorIsNamedToEveryWorkerOfEveryNode) {
  for (uint32_t odd_one : {1u, 2u}) {  // on the same node as rank 0, and on another
    Cluster cluster(2, 2, 1);
    auto sessions = cluster.ConnectAll();
    std::vector<std::future<Outcome>> pending;
    for (uint32_t rank = 0; rank < 4; ++rank) {
      BucketLayout layout = kLayout;
      const uint32_t node = rank / 2;
      const bool differs = odd_one == 1 ? rank == 1 : node == 1;
      if (differs) layout.tensors[0].name = "other";
      // The call may already fail because of an earlier rank's announcement; Submit then says why.
      (*sessions[rank])->RegisterBucket({0, 0}, layout).IgnoreError();
      pending.push_back(SubmitAsync(**sessions[rank], {0, 0}, Gradient()));
    }
    for (auto& outcome : pending) {
      const Outcome result = Get(outcome);
      EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(Message(result),
                  AllOf(HasSubstr("'w' [2000]"), HasSubstr("'other' [2000]"),
                        odd_one == 1 ? HasSubstr("rank 1") : HasSubstr("node 1 (host1)")));
    }
  }
}

TEST(WorkerFaultTest, AnotherWorldSizeIsRefusedOnEveryWorker) {
  Cluster cluster(1, 2, 1);
  const auto sessions =
      cluster.ConnectAll([](SessionOptions& o) { o.world_size = o.rank == 0 ? 2 : 3; });
  for (const auto& session : sessions) {
    EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Message(session),
                AllOf(HasSubstr("world size"), HasSubstr("rank 0"), HasSubstr("rank 1")));
  }
}

TEST(WorkerFaultTest, AnotherWorldSizeOnAnotherNodeIsRefusedOnEveryWorker) {
  Cluster cluster(2, 1, 1);
  const auto sessions = cluster.ConnectAll([](SessionOptions& o) { o.world_size = 2 + o.node; });
  for (const auto& session : sessions) {
    EXPECT_THAT(Message(session), HasSubstr("world size"));
  }
}

TEST(WorkerFaultTest, SecondWorkerWithTheSameRankIsRefusedAndTheJobGoesOn) {
  Cluster cluster(1, 2, 1);
  auto sessions = cluster.ConnectAll();
  const auto second = Session::Connect(cluster.OptionsFor(1));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(Message(second),
              AllOf(HasSubstr("rank 1"), HasSubstr(absl::StrCat("process ", getpid()))));
  std::vector<std::future<Outcome>> pending;
  for (auto& session : sessions) {
    ASSERT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
    pending.push_back(SubmitAsync(**session, {0, 0}, Gradient()));
  }
  for (auto& outcome : pending) EXPECT_TRUE(Get(outcome).ok());
}

// Returns why the sidecar refuses a worker, whose own patience has no end.
std::string RefusalOf(const SessionOptions& options) {
  auto connection = Connection::Connect(options.sidecar_path, Now() + kTestPatience);
  EXPECT_TRUE(connection.ok()) << connection.status();
  EXPECT_TRUE((*connection)->Send(MakeHello(options)).ok());
  const auto received = (*connection)->Receive(Now() + kTestPatience);
  EXPECT_TRUE(received.ok()) << received.status();
  const auto* fail = std::get_if<ipc::Fail>(&received->message);
  return fail == nullptr ? "it is not refused" : fail->message;
}

TEST(WorkerFaultTest, WorkerThatDoesNotConnectIsMissedWithinTheTimeout) {
  Cluster cluster(1, 3, 1);
  SessionOptions options = cluster.OptionsFor(0);
  options.timeout = std::chrono::seconds(1);
  EXPECT_THAT(RefusalOf(options), HasSubstr("only 1 of the 3 workers of host0"));
}

TEST(WorkerFaultTest, NodeThatDoesNotComeIsNamedWithinTheTimeout) {
  Cluster cluster(2, 1, 1);
  SessionOptions options = cluster.OptionsFor(0);
  options.timeout = std::chrono::seconds(2);  // well before a silent worker is missed
  EXPECT_THAT(RefusalOf(options), HasSubstr("node 1 of 2 did not join"));
}

// Takes contributions and never answers anything, like a process that was stopped.
class SilentMember : public ForwardingMember {
 public:
  using ForwardingMember::ForwardingMember;
  absl::Status Contribute(Contribution) override { return absl::OkStatus(); }
  absl::StatusOr<Pulse> Heartbeat(TimePoint /*deadline*/) override {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Now() + kTestPatience,
                       [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return has_left_; });
    return absl::DeadlineExceededError("no answer");
  }
  void Leave(const absl::Status& reason) override {
    {
      MutexLock lock(mutex_);
      has_left_ = true;
      changed_.NotifyAll();
    }
    ForwardingMember::Leave(reason);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool has_left_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(WorkerFaultTest, ShardThatDoesNotAnswerHeartbeatsIsStillNamedByTheSidecar) {
  Cluster cluster(2, 1, 1, [](Shard& shard) {
    return std::make_unique<ForwardingShard>(shard, [](std::unique_ptr<Member> member) {
      return std::make_unique<SilentMember>(std::move(member));
    });
  });
  // The sidecars' patience ends while they wait for their first heartbeat to be answered.
  auto sessions = cluster.ConnectAll([](SessionOptions& o) { o.timeout = kLayered; });
  std::vector<std::future<Outcome>> pending;
  for (auto& session : sessions) {
    ASSERT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
    pending.push_back(SubmitAsync(**session, {0, 0}, Gradient()));
  }
  for (auto& outcome : pending) {
    EXPECT_THAT(Message(Get(outcome)),
                HasSubstr("chunks did not come back; missing are aggregator shard 0"));
  }
}

// Heartbeats to the first shard are not answered until one has come to the second.
class WaitingMember : public ForwardingMember {
 public:
  struct Heard {
    Mutex mutex;
    CondVar changed;
    bool second ABSL_GUARDED_BY(mutex) = false;
  };
  WaitingMember(std::unique_ptr<Member> member, bool is_first, Heard& heard)
      : ForwardingMember(std::move(member)), is_first_(is_first), heard_(heard) {}

  absl::StatusOr<Pulse> Heartbeat(TimePoint deadline) override {
    MutexLock lock(heard_.mutex);
    if (!is_first_) heard_.second = true;
    heard_.changed.NotifyAll();
    const bool in_time = heard_.changed.WaitUntil(heard_.mutex, Now() + kTestPatience,
                                                  [&] { return heard_.second; });
    EXPECT_TRUE(in_time) << "the second shard was not asked while the first one did not answer";
    return ForwardingMember::Heartbeat(deadline);
  }

 private:
  const bool is_first_;
  Heard& heard_;
};

TEST(WorkerFaultTest, ShardThatDoesNotAnswerHeartbeatsDoesNotDelayAnothers) {
  WaitingMember::Heard heard;
  bool is_first = true;
  Cluster cluster(1, 1, 2, [&](Shard& shard) {
    return std::make_unique<ForwardingShard>(
        shard, [&heard, is_first = std::exchange(is_first, false)](std::unique_ptr<Member> member) {
          return std::make_unique<WaitingMember>(std::move(member), is_first, heard);
        });
  });
  auto sessions = cluster.ConnectAll();
  ASSERT_TRUE(sessions[0].ok()) << sessions[0].status();
  MutexLock lock(heard.mutex);
  EXPECT_TRUE(
      heard.changed.WaitUntil(heard.mutex, Now() + kTestPatience, [&] { return heard.second; }));
}

TEST(WorkerFaultTest, WorkerThatDoesNotSubmitIsNamedToTheOthers) {
  Cluster cluster(1, 2, 1);
  auto sessions = cluster.ConnectAll([](SessionOptions& o) { o.timeout = kLayered; });
  for (auto& session : sessions) ASSERT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
  auto pending = SubmitAsync(**sessions[0], {0, 0}, Gradient());
  const Outcome result = Get(pending);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Message(result), AllOf(HasSubstr("'job'"), HasSubstr("bucket 0 round 1"),
                                     HasSubstr("rank 1 did not submit")));
}

TEST(WorkerFaultTest, NodeThatDoesNotContributeIsNamedToTheOthers) {
  Cluster cluster(2, 1, 1);
  auto sessions = cluster.ConnectAll([](SessionOptions& o) { o.timeout = kLayered; });
  for (auto& session : sessions) ASSERT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
  auto pending = SubmitAsync(**sessions[0], {0, 0}, Gradient());
  const Outcome result = Get(pending);
  EXPECT_THAT(Message(result), AllOf(HasSubstr("bucket 0"), HasSubstr("node 1 (host1)")));
}

TEST(WorkerFaultTest, WorkerThatVanishesMidStepFailsEveryWorkerAtOnce) {
  Cluster cluster(2, 2, 2);
  // Rank 3 speaks raw ipc, so that it can vanish without a Leave.
  auto raw = std::async(std::launch::async, [&] {
    const SessionOptions o = cluster.OptionsFor(3);
    auto connection = *Connection::Connect(o.sidecar_path, Now() + kTestPatience);
    EXPECT_TRUE(connection->Send(MakeHello(o)).ok());
    EXPECT_TRUE(connection->Receive(Now() + kTestPatience).ok());
    return connection;
  });
  std::vector<std::future<absl::StatusOr<std::unique_ptr<Session>>>> connecting;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    connecting.push_back(std::async(std::launch::async, [&cluster, rank] {
      return Session::Connect(cluster.OptionsFor(rank));
    }));
  }
  std::vector<std::unique_ptr<Session>> sessions;
  std::vector<std::future<Outcome>> pending;
  for (auto& c : connecting) {
    sessions.push_back(*c.get());
    ASSERT_TRUE(sessions.back()->RegisterBucket({0, 0}, kLayout).ok());
    pending.push_back(SubmitAsync(*sessions.back(), {0, 0}, Gradient()));
  }
  raw.get().reset();
  for (auto& outcome : pending) {
    const Outcome result = Get(outcome);
    EXPECT_THAT(Message(result), AllOf(HasSubstr("rank 3"), HasSubstr("host1")));
  }
}

TEST(WorkerFaultTest, WorkerThatLeavesWhileOthersGoOnIsNamed) {
  Cluster cluster(1, 2, 1);
  auto sessions = cluster.ConnectAll();
  for (auto& session : sessions) ASSERT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
  (*sessions[1])->Close();
  auto pending = SubmitAsync(**sessions[0], {0, 0}, Gradient());
  EXPECT_THAT(Message(Get(pending)), HasSubstr("rank 1"));
}

TEST(WorkerFaultTest, SubmitAfterAFailureFailsAtOnceWithItsReason) {
  Cluster cluster(1, 1, 1);
  auto session = *Session::Connect(cluster.OptionsFor(0));
  cluster.sidecar(0).Stop(absl::UnavailableError("maintenance"));
  ASSERT_FALSE(session->RegisterBucket({0, 0}, kLayout).ok() && session->status().ok());
  for (int i = 0; i < 2; ++i) {
    auto pending = SubmitAsync(*session, {0, 0}, Gradient());
    EXPECT_FALSE(Get(pending).ok());
  }
  session->Close();
  auto pending = SubmitAsync(*session, {0, 0}, Gradient());
  EXPECT_FALSE(Get(pending).ok());
}

TEST(WorkerFaultTest, NobodyAtTheSocketIsSaidAtOnce) {
  SessionOptions options;
  options.sidecar_path = "/nonexistent/thalweg.sock";
  options.job = "job";
  const auto session = Session::Connect(options);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(session), HasSubstr("/nonexistent/thalweg.sock"));
}

TEST(WorkerFaultTest, OtherIpcVersionIsRefusedNamingBoth) {
  Cluster cluster(1, 1, 1);
  auto connection = *Connection::Connect(cluster.SocketPath(0), Now() + kTestPatience);
  ipc::Hello hello = MakeHello(cluster.OptionsFor(0));
  hello.ipc_version = kIpcVersion + 1;
  ASSERT_TRUE(connection->Send(hello).ok());
  auto received = connection->Receive(Now() + kTestPatience);
  ASSERT_TRUE(received.ok()) << received.status();
  const auto* fail = std::get_if<ipc::Fail>(&received->message);
  ASSERT_NE(fail, nullptr);
  EXPECT_THAT(fail->message, AllOf(HasSubstr(absl::StrCat("version ", kIpcVersion + 1)),
                                   HasSubstr(absl::StrCat("sidecar ", kIpcVersion))));
}

TEST(WorkerFaultTest, MessageOutOfTurnIsRefused) {
  Cluster cluster(1, 1, 1);
  auto connection = *Connection::Connect(cluster.SocketPath(0), Now() + kTestPatience);
  ASSERT_TRUE(connection->Send(ipc::Submit{{0, 0}, 1}).ok());
  auto received = connection->Receive(Now() + kTestPatience);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_THAT(std::get<ipc::Fail>(received->message).message, HasSubstr("expected Hello"));
}

TEST(WorkerFaultTest, LossScaleOfAnotherThanTheFirstWorkerIsRefused) {
  Cluster cluster(1, 2, 1);
  auto first = std::async(std::launch::async,
                          [&cluster] { return Session::Connect(cluster.OptionsFor(0)); });
  auto connection = *Connection::Connect(cluster.SocketPath(0), Now() + kTestPatience);
  const SessionOptions o = cluster.OptionsFor(1);
  ASSERT_TRUE(connection->Send(MakeHello(o)).ok());
  ASSERT_TRUE(connection->Receive(Now() + kTestPatience).ok());  // Welcome
  ASSERT_TRUE(connection->Send(ipc::Precision{2, 3}).ok());
  auto received = connection->Receive(Now() + kTestPatience);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_THAT(std::get<ipc::Fail>(received->message).message,
              HasSubstr("local rank 1 sent Precision"));
  EXPECT_EQ(cluster.registry().GetGauge("thalweg_sidecar_loss_scale", "").Value(), 0);
  ASSERT_TRUE(first.get().ok());
}

TEST(WorkerFaultTest, LossScaleThatIsNoneIsRefused) {
  for (const double scale : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    Cluster cluster(1, 1, 1);
    auto connection = *Connection::Connect(cluster.SocketPath(0), Now() + kTestPatience);
    ASSERT_TRUE(connection->Send(MakeHello(cluster.OptionsFor(0))).ok());
    ASSERT_TRUE(connection->Receive(Now() + kTestPatience).ok());  // Welcome
    ASSERT_TRUE(connection->Send(ipc::Precision{scale, 0}).ok());
    auto received = connection->Receive(Now() + kTestPatience);
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_THAT(std::get<ipc::Fail>(received->message).message,
                HasSubstr("expected a positive, finite one, or 0 for none"));
    EXPECT_EQ(cluster.registry().GetGauge("thalweg_sidecar_loss_scale", "").Value(), 0);
  }
}

// Returns the next message that says more than that the sidecar is alive.
absl::StatusOr<Received> Next(Connection& connection) {
  auto received = connection.Receive(Now() + kTestPatience);
  while (received.ok() && std::holds_alternative<ipc::Alive>(received->message)) {
    received = connection.Receive(Now() + kTestPatience);
  }
  return received;
}

// Far more results than a socket holds, so that most of them wait in the sidecar.
TEST(WorkerFaultTest, WorkerThatDoesNotReadHoldsUpNobodyAndFindsAllResultsInOrder) {
  constexpr uint64_t kRounds = 800;
  const BucketLayout layout{DType::kFloat32, {{"w", {1}}}};
  const float share = 1;
  Cluster cluster(2, 2, 1);
  std::vector<std::future<absl::StatusOr<std::unique_ptr<Session>>>> connecting;
  for (const uint32_t rank : {0u, 2u, 3u}) {
    connecting.push_back(std::async(std::launch::async, [&cluster, rank] {
      return Session::Connect(cluster.OptionsFor(rank));
    }));
  }
  const SessionOptions o = cluster.OptionsFor(1);
  auto connection = *Connection::Connect(o.sidecar_path, Now() + kTestPatience);
  ASSERT_TRUE(connection->Send(MakeHello(o)).ok());
  ASSERT_TRUE(connection->Receive(Now() + kTestPatience).ok());  // Welcome
  auto input = *BucketArena::Create("input", sizeof share, true);
  std::memcpy(input.payload(), &share, sizeof share);
  input.PublishReady(1);
  ASSERT_TRUE(connection->Send(ipc::RegisterBucket{{0, 0}, layout, {}}, input.fd()).ok());
  ASSERT_TRUE(connection->Receive(Now() + kTestPatience).ok());  // BucketReady
  std::vector<std::unique_ptr<Session>> sessions;
  for (auto& session : connecting) {
    sessions.push_back(*session.get());
    ASSERT_TRUE(sessions.back()->RegisterBucket({0, 0}, layout).ok());
  }
  for (uint64_t round = 1; round <= kRounds; ++round) {
    ASSERT_TRUE(connection->Send(ipc::Submit{{0, 0}, round}).ok());
    std::vector<std::future<Outcome>> pending;
    for (auto& session : sessions) {
      pending.push_back(SubmitAsync(*session, {0, 0}, std::as_bytes(std::span(&share, 1))));
    }
    for (auto& outcome : pending) ASSERT_TRUE(Get(outcome).ok()) << round;
  }
  ASSERT_TRUE(Next(*connection).ok());  // Placed
  for (uint64_t round = 1; round <= kRounds; ++round) {
    const auto received = Next(*connection);
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_EQ(std::get<ipc::Complete>(received->message).round, round);
  }
}

TEST(WorkerFaultTest, CallbackThatWaitsForAnotherBucketDoesNotDeadlockTheSession) {
  Cluster cluster(1, 1, 1);
  auto session = *Session::Connect(cluster.OptionsFor(0));
  for (uint32_t b : {0u, 1u}) ASSERT_TRUE(session->RegisterBucket({b, 0}, kLayout).ok());
  // Bucket 0's callback blocks the completion thread until the sidecar has received bucket 1's
  // result, which the progress thread must still count.
  std::promise<void> first_done;
  session->Submit({0, 0}, Gradient(), {}, [&](absl::StatusOr<ReducedBucket>) {
    auto second = SubmitAsync(*session, {1, 0}, Gradient());
    while (session->stats().rounds < 2) std::this_thread::yield();
    first_done.set_value();
  });
  auto done = first_done.get_future();
  Get(done);
}

TEST(WorkerFaultTest, JobThatNeedsMoreThanTheShardsMemoryIsRefusedWhileAnotherGoesOn) {
  constexpr uint64_t kMemory = 64 << 20;
  Cluster cluster(2, 1, 1, {}, /*window_chunks=*/64, {}, nullptr, kMemory);
  const auto small = cluster.ConnectAll();
  for (const auto& session : small) {
    ASSERT_TRUE(session.ok()) << session.status();
    ASSERT_TRUE((*session)->RegisterBucket({0, 0}, kLayout).ok());
  }
  const auto large = cluster.ConnectAll([](SessionOptions& o) {
    o.job = "large";
    o.chunk_bytes = kMaxChunkBytes;
  });
  for (const auto& refused : large) {
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(Message(refused),
                AllOf(HasSubstr("job 'large'"), HasSubstr("(805306368 for 2 nodes"),
                      HasSubstr("THALWEG_MEMORY_LIMIT")));
  }
  std::vector<std::future<Outcome>> pending;
  for (const auto& session : small) pending.push_back(SubmitAsync(**session, {0, 0}, Gradient()));
  for (auto& outcome : pending) EXPECT_TRUE(Get(outcome).ok());
}

TEST(WorkerFaultTest, SocketFilesAreGoneAfterTheSidecar) {
  std::string path;
  {
    Cluster cluster(1, 1, 1);
    path = cluster.SocketPath(0);
    ASSERT_TRUE(std::filesystem::exists(path));
    cluster.sidecar(0).Stop(absl::UnavailableError("done"));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(WorkerFaultTest, ForkedChildNeitherUsesNorKeepsAliveTheParentsSession) {
#ifdef THALWEG_TSAN
  GTEST_SKIP() << "ThreadSanitizer does not support fork in a threaded process";
#endif
  Cluster cluster(1, 1, 1);
  auto session = *Session::Connect(cluster.OptionsFor(0));
  ASSERT_TRUE(session->RegisterBucket({0, 0}, kLayout).ok());
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::vector<absl::Status> answers = {
        session->status(), session->RegisterBucket({1, 0}, kLayout),
        session->Reduce({0, 0}, Gradient()).status(), session->LoadCodecState({}),
        session->WriteWeights({0, 0}, 0, {}, 0)};
    const bool refused = std::all_of(answers.begin(), answers.end(), absl::IsFailedPrecondition);
    session->Abort("it has aborted the job");
    session.reset();
    char byte;
    // The child lives until the parent has seen that its session works and ends without it.
    const bool told = read(pipe_fds[0], &byte, 1) == 1;
    _exit(refused && told ? 0 : 1);
  }
  auto pending = SubmitAsync(*session, {0, 0}, Gradient());
  EXPECT_TRUE(Get(pending).ok());
  session->Close();
  const TimePoint deadline = Now() + kTestPatience;
  while (cluster.sidecar(0).Reap().now > 0 && Now() < deadline) std::this_thread::yield();
  EXPECT_EQ(cluster.sidecar(0).Reap().now, 0u);
  ASSERT_EQ(write(pipe_fds[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

}  // namespace
}  // namespace thalweg::faults_test
