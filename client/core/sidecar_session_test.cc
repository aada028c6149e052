#include "client/core/sidecar_session.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace thalweg {
namespace {

constexpr Duration kPatience = std::chrono::seconds(20);
constexpr uint32_t kGroup = 7;

// The test plays the sidecar at the other end of the connection.
class SidecarSessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2] = {};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    sidecar_ = std::make_unique<Connection>(UniqueFd(ends[0]));
    SessionOptions options;
    options.job = "job";
    options.sidecar_path = "/the/socket";
    session_ = std::make_unique<SidecarSession>(
        options, ipc::Welcome{.num_shards = 1, .server_version = "", .chunk_bytes = 1 << 16},
        std::make_unique<Connection>(UniqueFd(ends[1])), nullptr);
  }

  void MakeGroup() {
    ASSERT_TRUE(session_->MakeGroup({.number = kGroup, .rank = 0, .nodes = {0}, .name = "g"}).ok());
    ASSERT_TRUE(Next<ipc::MakeGroup>().has_value());
  }
  void Begin(std::function<void(absl::Status)> done) {
    CollectiveCall call;
    call.group = kGroup;
    call.timeout = kPatience;
    session_->Collect(std::move(call), std::move(done));
  }
  template <typename Message>
  std::optional<Message> Next() {
    auto received = sidecar_->Receive(Now() + kPatience);
    while (received.ok() && std::holds_alternative<ipc::Alive>(received->message)) {
      received = sidecar_->Receive(Now() + kPatience);
    }
    if (!received.ok()) return std::nullopt;
    const auto* message = std::get_if<Message>(&received->message);
    return message == nullptr ? std::nullopt : std::optional<Message>(*message);
  }
  void Complete(uint32_t group, uint64_t sequence) {
    ipc::Collected collected;
    collected.group = group;
    collected.sequence = sequence;
    ASSERT_TRUE(sidecar_->Send(collected).ok());
  }

  std::unique_ptr<Connection> sidecar_;
  std::unique_ptr<SidecarSession> session_;
};

// Whether sending or receiving notices first is a matter of chance: it is tried again and again.
TEST_F(SidecarSessionTest, SidecarThatIsGoneIsSaidToBeGoneHoweverItIsNoticed) {
  for (int i = 0; i < 200; ++i) {
    SetUp();
    const BucketId id{.index = 0};
    ASSERT_TRUE(session_->RegisterBucket(id, {.tensors = {{"w", {4}}}}).ok());
    sidecar_.reset();
    const std::array<std::byte, 16> gradient{};
    const auto reduced = session_->Reduce(id, gradient);
    ASSERT_EQ(reduced.status().code(), absl::StatusCode::kUnavailable);
    ASSERT_NE(std::string(reduced.status().message()).find("the sidecar at /the/socket is gone"),
              std::string::npos)
        << reduced.status();
  }
}

TEST_F(SidecarSessionTest, LastWordsOfASidecarAreTheReasonHoweverItsEndIsNoticed) {
  for (int i = 0; i < 200; ++i) {
    SetUp();
    MakeGroup();
    ASSERT_TRUE(sidecar_->Send(ipc::Fail{absl::StatusCode::kAborted, "the reason"}).ok());
    sidecar_.reset();
    std::promise<absl::Status> outcome;
    Begin([&](absl::Status status) { outcome.set_value(std::move(status)); });
    ASSERT_EQ(outcome.get_future().get(), absl::AbortedError("the reason"));
  }
}

TEST_F(SidecarSessionTest, CollectivesOfAGroupAreFinishedInTheOrderInWhichTheyBegan) {
  MakeGroup();
  std::vector<int> finished;
  std::promise<void> all;
  for (int i = 1; i <= 3; ++i) {
    Begin([&, i](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      finished.push_back(i);
      if (i == 3) all.set_value();
    });
    ASSERT_TRUE(Next<ipc::Collect>().has_value());
  }
  Complete(kGroup, 3);
  Complete(kGroup, 2);
  Complete(kGroup, 1);
  all.get_future().get();
  EXPECT_EQ(finished, (std::vector<int>{1, 2, 3}));
}

TEST_F(SidecarSessionTest, CallbackMayWaitForACollectiveOfItsOwnWhichHasAnOrderOfItsOwn) {
  MakeGroup();
  std::promise<absl::Status> inner;
  std::promise<absl::Status> outer;
  Begin([&](const absl::Status&) {
    Begin([&](absl::Status status) { inner.set_value(std::move(status)); });
    outer.set_value(inner.get_future().get());
  });
  Begin([](const absl::Status&) {});
  ASSERT_EQ(Next<ipc::Collect>()->sequence, 1);
  ASSERT_EQ(Next<ipc::Collect>()->sequence, 2);
  Complete(kGroup, 1);
  const auto group = Next<ipc::MakeGroup>();
  ASSERT_TRUE(group.has_value());
  EXPECT_EQ(group->name, "g (in callbacks, depth 1)");
  const auto nested = Next<ipc::Collect>();
  ASSERT_TRUE(nested.has_value());
  EXPECT_EQ(nested->group, group->group);
  EXPECT_NE(nested->group, kGroup);
  EXPECT_EQ(nested->sequence, 1);
  Complete(nested->group, 1);
  EXPECT_TRUE(outer.get_future().get().ok());
  Complete(kGroup, 2);
}

TEST_F(SidecarSessionTest, FailureReachesACallbackThatWaitsForAnotherOne) {
  MakeGroup();
  std::promise<absl::Status> second;
  std::promise<absl::Status> heard;
  std::promise<void> running;
  Begin([&](const absl::Status&) {
    running.set_value();
    heard.set_value(second.get_future().get());
  });
  Begin([&](absl::Status status) { second.set_value(std::move(status)); });
  Complete(kGroup, 1);
  running.get_future().get();
  ASSERT_TRUE(sidecar_->Send(ipc::Fail{absl::StatusCode::kAborted, "the reason"}).ok());
  EXPECT_EQ(heard.get_future().get(), absl::AbortedError("the reason"));
}

}  // namespace
}  // namespace thalweg
