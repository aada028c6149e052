// These tests let a session go on with another process of its sidecar, which they play.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/sidecar_session.h"
#include "client/core/testing/open_sockets.h"
#include "core/base/testing/test_patience.h"
#include "core/ipc/listener.h"

namespace thalweg::sidecar_session_return_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Values = std::vector<float>;

constexpr BucketId kId{.index = 0};
const BucketLayout kLayout{.tensors = {{"w", {4}}}};
constexpr uint64_t kBytes = 4 * sizeof(float);
const ipc::JobTerms kTerms{.epochs = {11}, .window_chunks = 3, .shares = {5}};

class SessionReturnTest : public ::testing::Test {
 protected:
  SessionReturnTest() {
    char folder[] = "/tmp/thalweg-test-XXXXXX";
    folder_ = mkdtemp(folder);
    options_.job = "job";
    options_.sidecar_path = folder_ + "/socket";
    options_.reconnect = kTestPatience;
    options_.timeout = kTestPatience;
  }
  ~SessionReturnTest() override {
    session_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Begin() {
    int ends[2] = {};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    sidecar_ = std::make_shared<Connection>(UniqueFd(ends[0]));
    ipc::Hello hello;
    hello.ipc_version = kIpcVersion;
    hello.job = options_.job;
    const ipc::Welcome welcome{
        .num_shards = 1, .server_version = "", .chunk_bytes = 1 << 16, .terms = kTerms};
    session_ = std::make_unique<SidecarSession>(
        options_, hello, welcome, std::make_shared<Connection>(UniqueFd(ends[1])), nullptr);
  }
  // Announces the bucket, and lets its first round end with these values.
  void CompleteOneRound(const Values& values, BucketId id = kId) {
    ASSERT_TRUE(session_->RegisterBucket(id, kLayout).ok());
    ASSERT_TRUE(Next<ipc::RegisterBucket>().has_value());
    BucketArena arena = ArenaOf(values);
    ASSERT_TRUE(sidecar_->Send(ipc::BucketReady{id, {}}, arena.fd()).ok());
    ASSERT_TRUE(sidecar_->Send(ipc::Placed{id, {0}, {kBytes}}).ok());
    auto first = Reduce(id);
    ASSERT_TRUE(Next<ipc::Submit>().has_value());
    ASSERT_TRUE(sidecar_->Send(ipc::Complete{.id = id, .round = 1, .nonfinite_elems = 2}).ok());
    ASSERT_EQ(first.get(), values);
  }
  std::future<Values> Reduce(BucketId id = kId) {
    return std::async(std::launch::async, [this, id]() -> Values {
      const std::vector<std::byte> gradient(kBytes);
      const auto reduced = session_->Reduce(id, gradient);
      if (!reduced.ok()) return {};
      Values values(reduced->bytes.size() / sizeof(float));
      std::memcpy(values.data(), reduced->bytes.data(), reduced->bytes.size());
      return values;
    });
  }
  // Lets a round be in flight after a first one.
  std::future<Values> BeginSecondRound() {
    Begin();
    CompleteOneRound({1, 2, 3, 4});
    auto second = Reduce();
    EXPECT_TRUE(Next<ipc::Submit>().has_value());
    return second;
  }
  static BucketArena ArenaOf(const Values& values) {
    BucketArena arena = *BucketArena::Create("result", kBytes, true);
    std::memcpy(arena.payload(), values.data(), kBytes);
    return arena;
  }
  // The sidecar's process ends, and the next one gets the worker's Hello.
  void ReplaceSidecar() {
    sidecar_.reset();
    auto listener = Listener::Bind(options_.sidecar_path);
    ASSERT_TRUE(listener.ok()) << listener.status();
    auto accepted = (*listener)->Accept();
    ASSERT_TRUE(accepted.ok()) << accepted.status();
    sidecar_ = *std::move(accepted);
    listener_ = *std::move(listener);
    const auto hello = Next<ipc::Hello>();
    ASSERT_TRUE(hello.has_value());
    hello_ = *hello;
  }
  template <typename Message>
  std::optional<Message> Next() {
    auto received = sidecar_->Receive(Now() + kTestPatience);
    while (received.ok() && std::holds_alternative<ipc::Alive>(received->message)) {
      received = sidecar_->Receive(Now() + kTestPatience);
    }
    if (!received.ok()) return std::nullopt;
    fd_ = std::move(received->fd);
    const auto* message = std::get_if<Message>(&received->message);
    return message == nullptr ? std::nullopt : std::optional<Message>(*message);
  }
  // Takes what the worker brings of the bucket after its first round.
  void TakeKeptBucket() {
    ASSERT_TRUE(Next<ipc::KeptBucket>().has_value());
    ASSERT_TRUE(Next<ipc::KeptResult>().has_value());
  }
  void WelcomeBack(const Values& values) {
    const BucketArena arena = ArenaOf(values);
    ASSERT_TRUE(sidecar_->Send(ipc::BucketReady{kId, {}}, arena.fd()).ok());
    ASSERT_TRUE(
        sidecar_->Send(ipc::Welcome{.num_shards = 1, .server_version = "", .chunk_bytes = 1 << 16})
            .ok());
  }
  std::string WhyGone() {
    sidecar_.reset();
    const TimePoint deadline = Now() + kTestPatience;
    while (session_->status().ok() && Now() < deadline) std::this_thread::yield();
    return std::string(session_->status().message());
  }

  SessionOptions options_;
  std::string folder_;
  std::shared_ptr<Connection> sidecar_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<SidecarSession> session_;
  ipc::Hello hello_;
  UniqueFd fd_;  // of the last message
};

TEST_F(SessionReturnTest, NextProcessGetsTermsPlacementGradientsAndTheLastResult) {
  Begin();
  CompleteOneRound({1, 2, 3, 4});
  ReplaceSidecar();
  EXPECT_EQ(hello_.known, kTerms);
  EXPECT_EQ(hello_.chunk_bytes, 1u << 16);
  EXPECT_EQ(hello_.kept_buckets, 1u);
  const auto bucket = Next<ipc::KeptBucket>();
  ASSERT_TRUE(bucket.has_value());
  EXPECT_EQ(*bucket, (ipc::KeptBucket{kId, kLayout, 1, 2, {0}, {kBytes}}));
  EXPECT_TRUE(BucketArena::Open(std::move(fd_), kBytes).ok());
  ASSERT_TRUE(Next<ipc::KeptResult>().has_value());
  const auto result = BucketArena::Open(std::move(fd_), kBytes);
  ASSERT_TRUE(result.ok()) << result.status();
  Values values(4);
  std::memcpy(values.data(), result->payload(), kBytes);
  EXPECT_THAT(values, ElementsAre(1, 2, 3, 4));
}

TEST_F(SessionReturnTest, NextProcessGetsTheLastMemoryOfABucketsCodecs) {
  Begin();
  CompleteOneRound({1, 2, 3, 4});
  for (const float value : {1.0F, 2.0F}) {
    const BucketArena memory = ArenaOf({value, value, value, value});
    ASSERT_TRUE(sidecar_->Send(ipc::CodecMemory{kId, kBytes}, memory.fd()).ok());
  }
  ASSERT_TRUE(sidecar_->Send(ipc::CodecMemory{{9, 0}, kBytes}, ArenaOf({0, 0, 0, 0}).fd()).ok());
  ReplaceSidecar();
  const auto bucket = Next<ipc::KeptBucket>();
  ASSERT_TRUE(bucket.has_value());
  EXPECT_TRUE(bucket->has_codec_memory);
  ASSERT_TRUE(Next<ipc::KeptResult>().has_value());
  EXPECT_EQ(Next<ipc::CodecMemory>(), (ipc::CodecMemory{kId, kBytes}));
  const auto memory = BucketArena::Open(std::move(fd_), kBytes);
  ASSERT_TRUE(memory.ok()) << memory.status();
  float first = 0;
  std::memcpy(&first, memory->payload(), sizeof first);
  EXPECT_EQ(first, 2);
}

TEST_F(SessionReturnTest, NextProcessIsAskedForACodecStateThatHasNotCome) {
  Begin();
  CompleteOneRound({1, 2, 3, 4});
  auto saved = std::async(std::launch::async, [this] {
    std::vector<std::byte> state;
    const absl::Status status = session_->SaveCodecState(
        [&](std::span<const std::byte> bytes) { state.assign(bytes.begin(), bytes.end()); });
    return status.ok() ? state.size() : 0;
  });
  ASSERT_TRUE(Next<ipc::GetCodecState>().has_value());
  ReplaceSidecar();
  TakeKeptBucket();
  WelcomeBack({1, 2, 3, 4});
  ASSERT_TRUE(Next<ipc::GetCodecState>().has_value());
  ASSERT_TRUE(sidecar_->Send(ipc::CodecState{kBytes}, ArenaOf({0, 0, 0, 0}).fd()).ok());
  EXPECT_EQ(saved.get(), kBytes);
}

TEST_F(SessionReturnTest, RoundInFlightIsSubmittedAgainAndEndsThere) {
  auto second = BeginSecondRound();
  ReplaceSidecar();
  TakeKeptBucket();
  WelcomeBack({5, 6, 7, 8});
  const auto again = Next<ipc::Submit>();
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->round, 2u);
  ASSERT_TRUE(sidecar_->Send(ipc::Complete{.id = kId, .round = 2}).ok());
  EXPECT_THAT(second.get(), ElementsAre(5, 6, 7, 8));
  EXPECT_EQ(session_->stats().sidecar_returns, 1u);
  EXPECT_TRUE(session_->status().ok());
}

TEST_F(SessionReturnTest, ForkedChildKeepsNoConnectionThatIsStillToBeWelcomed) {
  auto second = BeginSecondRound();
  ReplaceSidecar();
  TakeKeptBucket();
  // Neither the former connection nor the next one.
  EXPECT_EQ(OpenSocketsOfChild(), OpenSockets() - 2);
  session_->Close();
  second.get();
}

TEST_F(SessionReturnTest, NextProcessKnowsTheLossScaleBeforeARoundBegins) {
  auto second = BeginSecondRound();
  session_->NotePrecision(512, 0);
  ASSERT_TRUE(Next<ipc::Precision>().has_value());
  ReplaceSidecar();
  TakeKeptBucket();
  WelcomeBack({5, 6, 7, 8});
  const auto precision = Next<ipc::Precision>();
  ASSERT_TRUE(precision.has_value());
  EXPECT_EQ(precision->loss_scale, 512);
  ASSERT_TRUE(Next<ipc::Submit>().has_value());
  session_->Close();
  second.get();
}

TEST_F(SessionReturnTest, EndOfARoundThatWasNotHeardOfIsHeardFromTheNextProcess) {
  auto second = BeginSecondRound();
  ReplaceSidecar();
  TakeKeptBucket();
  const BucketArena arena = ArenaOf({5, 6, 7, 8});
  ASSERT_TRUE(sidecar_->Send(ipc::BucketReady{kId, {}}, arena.fd()).ok());
  ASSERT_TRUE(sidecar_->Send(ipc::Complete{.id = kId, .round = 2}).ok());
  ASSERT_TRUE(
      sidecar_->Send(ipc::Welcome{.num_shards = 1, .server_version = "", .chunk_bytes = 1 << 16})
          .ok());
  EXPECT_THAT(second.get(), ElementsAre(5, 6, 7, 8));
  auto third = Reduce();
  const auto next = Next<ipc::Submit>();  // the second one is not repeated
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->round, 3u);
  sidecar_.reset();
  session_->Close();
  third.get();
}

TEST_F(SessionReturnTest, WhatBeginsWhileTheSidecarIsAwayIsToldInOrder) {
  constexpr BucketId kLater{.index = 1};
  Begin();
  CompleteOneRound({1, 2, 3, 4});
  ReplaceSidecar();  // the session has brought everything along, and is away
  TakeKeptBucket();
  ASSERT_TRUE(session_->RegisterBucket(kLater, kLayout).ok());
  auto later = Reduce(kLater);
  while (session_->stats().raw_bytes < 2 * kBytes) std::this_thread::yield();
  auto second = Reduce();
  while (session_->stats().raw_bytes < 3 * kBytes) std::this_thread::yield();
  WelcomeBack({1, 2, 3, 4});
  const auto announced = Next<ipc::RegisterBucket>();
  ASSERT_TRUE(announced.has_value());
  EXPECT_EQ(announced->id, kLater);
  for (const BucketId id : {kLater, kId}) {
    const auto submit = Next<ipc::Submit>();
    ASSERT_TRUE(submit.has_value());
    EXPECT_EQ(submit->id, id);
  }
  session_->Close();
  later.get();
  second.get();
}

TEST_F(SessionReturnTest, ProcessThatDiesBeforeItsWelcomeIsFollowedByAnother) {
  auto second = BeginSecondRound();
  ReplaceSidecar();
  TakeKeptBucket();
  listener_.reset();
  ReplaceSidecar();
  TakeKeptBucket();
  WelcomeBack({5, 6, 7, 8});
  ASSERT_TRUE(Next<ipc::Submit>().has_value());
  ASSERT_TRUE(sidecar_->Send(ipc::Complete{.id = kId, .round = 2}).ok());
  EXPECT_THAT(second.get(), ElementsAre(5, 6, 7, 8));
}

TEST_F(SessionReturnTest, WhatIsNotNotedIsSentToTheNextProcess) {
  auto second = BeginSecondRound();
  ReplaceSidecar();
  TakeKeptBucket();
  auto noted = std::async(std::launch::async, [this] { session_->NotePrecision(8, 1); });
  while (session_->stats().loss_scale != 8) std::this_thread::yield();
  WelcomeBack({5, 6, 7, 8});
  const auto scale = Next<ipc::Precision>();
  ASSERT_TRUE(scale.has_value());
  EXPECT_EQ(scale->loss_scale, 8);
  EXPECT_EQ(scale->skipped_steps, 0u);
  ASSERT_TRUE(Next<ipc::Submit>().has_value());
  const auto told = Next<ipc::Precision>();
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->loss_scale, 8);
  EXPECT_EQ(told->skipped_steps, 1u);
  noted.get();
  EXPECT_TRUE(session_->status().ok());
  session_->Close();
  second.get();
}

TEST_F(SessionReturnTest, RefusalOfTheNextProcessIsTheReason) {
  auto second = BeginSecondRound();
  ReplaceSidecar();
  ASSERT_TRUE(sidecar_->Send(ipc::Fail{absl::StatusCode::kAborted, "the reason"}).ok());
  EXPECT_THAT(second.get(), ElementsAre());
  EXPECT_EQ(session_->status(), absl::AbortedError("the reason"));
}

TEST_F(SessionReturnTest, SidecarThatStaysAwayIsSaidToBeGone) {
  options_.reconnect = std::chrono::milliseconds(150);
  Begin();
  CompleteOneRound({1, 2, 3, 4});
  EXPECT_THAT(WhyGone(), HasSubstr("within 0.15 s (THALWEG_RECONNECT) no other process"));
}

TEST_F(SessionReturnTest, SessionThatIsClosedMeanwhileDoesNotWait) {
  auto second = BeginSecondRound();
  sidecar_.reset();
  session_->Close();
  EXPECT_THAT(second.get(), ElementsAre());
}

TEST_F(SessionReturnTest, WhyAJobCannotGoOnIsSaid) {
  const std::string cannot = "the job cannot go on with another process: ";
  const SessionOptions usual = options_;
  const auto why_gone = [&] {
    Begin();
    CompleteOneRound({1, 2, 3, 4});
    return WhyGone();
  };
  options_.reconnect = Duration::zero();
  EXPECT_THAT(why_gone(), HasSubstr(cannot + "THALWEG_RECONNECT is 0"));
  options_ = usual;
  options_.num_nodes = 2;
  EXPECT_THAT(why_gone(), HasSubstr(cannot + "it has no secret"));
  options_ = usual;
  Begin();
  CompleteOneRound({1, 2, 3, 4});
  ASSERT_TRUE(session_->LoadCodecState({}).ok());
  EXPECT_THAT(WhyGone(), HasSubstr(cannot + "a codec's state had just been loaded"));
  // Other buckets are perhaps without a round with that state, or with their new layout.
  Begin();
  ASSERT_TRUE(session_->LoadCodecState({}).ok());
  ASSERT_TRUE(Next<ipc::CodecState>().has_value());
  CompleteOneRound({1, 2, 3, 4});
  EXPECT_THAT(WhyGone(), HasSubstr(cannot + "a codec's state had just been loaded"));
  Begin();
  CompleteOneRound({1, 2, 3, 4}, {kId.index, 1});
  EXPECT_THAT(WhyGone(), HasSubstr(cannot + "bucket 0 (layout 1) had just got another layout"));
  Begin();
  CompleteOneRound({1, 2, 3, 4});
  ASSERT_TRUE(session_->MakeGroup({.number = 7, .rank = 0, .nodes = {0}, .name = "g"}).ok());
  EXPECT_THAT(WhyGone(), HasSubstr(cannot + "its groups' collectives"));
}

}  // namespace
}  // namespace thalweg::sidecar_session_return_test
