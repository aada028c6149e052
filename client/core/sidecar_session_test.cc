#include "client/core/sidecar_session.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/connects.h"
#include "core/ipc/listener.h"

namespace thalweg::sidecar_session_test {
namespace {

constexpr Duration kPatience = std::chrono::seconds(20);
constexpr uint32_t kGroup = 7;

// The test plays the sidecar at the other end of the connection.
class SidecarSessionTest : public ::testing::Test {
 protected:
  void SetUp() override { Open(SessionOptions().timeout); }
  void Open(Duration timeout) {
    int ends[2] = {};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    sidecar_ = std::make_unique<Connection>(UniqueFd(ends[0]));
    SessionOptions options;
    options.job = "job";
    options.sidecar_path = "/the/socket";
    options.timeout = timeout;
    session_ = std::make_unique<SidecarSession>(
        options, ipc::Hello(),
        ipc::Welcome{.num_shards = 1, .server_version = "", .chunk_bytes = 1 << 16},
        std::make_unique<Connection>(UniqueFd(ends[1])), nullptr);
  }

  void MakeGroup(uint32_t number = kGroup) {
    ASSERT_TRUE(session_->MakeGroup({.number = number, .rank = 0, .nodes = {0}, .name = "g"}).ok());
    ASSERT_TRUE(Next<ipc::MakeGroup>().has_value());
  }
  void Begin(std::function<void(absl::Status)> done, uint32_t group = kGroup,
             std::span<std::byte> got = {}) {
    CollectiveCall call;
    call.group = group;
    call.got = {got};
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

TEST_F(SidecarSessionTest, AbortTellsTheSidecarAndEndsWhatIsInFlight) {
  MakeGroup();
  std::promise<absl::Status> outcome;
  Begin([&](absl::Status status) { outcome.set_value(std::move(status)); });
  ASSERT_TRUE(Next<ipc::Collect>().has_value());
  session_->Abort("it has aborted the job");
  EXPECT_EQ(outcome.get_future().get().code(), absl::StatusCode::kCancelled);
  const auto told = Next<ipc::Fail>();
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->code, absl::StatusCode::kAborted);
}

TEST_F(SidecarSessionTest, SidecarThatIsSilentIsToldThatTheJobHasFailedForAll) {
  Open(std::chrono::milliseconds(200));
  MakeGroup();
  std::promise<absl::Status> outcome;
  Begin([&](absl::Status status) { outcome.set_value(std::move(status)); });
  ASSERT_TRUE(Next<ipc::Collect>().has_value());
  const absl::Status why = outcome.get_future().get();
  EXPECT_EQ(why.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(std::string(why.message()).find("/the/socket has not answered for 0.2 s"),
            std::string::npos)
      << why;
  const auto told = Next<ipc::Fail>();
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(absl::Status(told->code, told->message), why);
}

TEST(SessionConnectTest, CancelledConnectDoesNotWaitForTheOthers) {
  SessionOptions options;
  options.job = "job";
  options.sidecar_path = absl::StrCat(::testing::TempDir(), "session_connect", getpid(), ".sock");
  options.timeout = kPatience;
  const auto listener = Listener::Bind(options.sidecar_path);
  ASSERT_TRUE(listener.ok()) << listener.status();
  auto outcome = std::async(std::launch::async, [&] { return Session::Connect(options).status(); });
  const auto connection = (*listener)->Accept();
  ASSERT_TRUE(connection.ok()) << connection.status();
  ASSERT_TRUE((*connection)->Receive(Now() + kPatience).ok());
  CancelConnects();
  EXPECT_EQ(outcome.get().code(), absl::StatusCode::kCancelled);
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

// Otherwise the others would take this worker's next collective for the one that it has left out.
TEST_F(SidecarSessionTest, CollectiveThatCannotBeginFailsTheJob) {
  MakeGroup();
  std::vector<std::byte> given(ipc::kMaxInlineBytes + 1);
  CollectiveCall call{.group = kGroup, .timeout = kPatience};
  call.given = {given};
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{.rlim_cur = 3, .rlim_max = files.rlim_max};  // no more than there are
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  absl::Status begun;
  session_->Collect(std::move(call), [&](absl::Status status) { begun = std::move(status); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_FALSE(begun.ok());
  const auto told = Next<ipc::Fail>();
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->message, begun.message());
  EXPECT_EQ(session_->status(), begun);
}

// The sidecar of these tests has results in an arena: bytes 1, 2, 3, ….
class CollectedPartTest : public SidecarSessionTest {
 protected:
  static constexpr uint32_t kArena = 3;
  static constexpr uint32_t kOther = kGroup + 1;
  static constexpr uint64_t kBytes = 8;

  void SetUp() override {
    SidecarSessionTest::SetUp();
    MakeGroup();
    MakeGroup(kOther);
    auto arena = BucketArena::Create("results", kBytes, true);
    ASSERT_TRUE(arena.ok());
    for (uint64_t i = 0; i < kBytes; ++i) arena->payload()[i] = static_cast<std::byte>(i + 1);
    ASSERT_TRUE(sidecar_->Send(ipc::ShareArena{kArena, kBytes}, arena->fd()).ok());
  }
  // Begins a collective that gets all of the arena.
  void BeginLarge(std::vector<std::byte>* got, std::promise<absl::Status>* done) {
    got->assign(kBytes, std::byte{0});
    Begin([done](absl::Status status) { done->set_value(std::move(status)); }, kGroup, *got);
    ASSERT_TRUE(Next<ipc::Collect>().has_value());
  }
  void SendPart(uint64_t sequence, uint64_t begin, uint64_t bytes) {
    const ipc::CollectedPart part{kGroup, sequence, kArena, 0, begin, bytes};
    ASSERT_TRUE(sidecar_->Send(part).ok());
    // Messages are taken in order: when a collective of the other group is done, the part is taken.
    std::promise<absl::Status> taken;
    Begin([&](absl::Status status) { taken.set_value(std::move(status)); }, kOther);
    ASSERT_TRUE(Next<ipc::Collect>().has_value());
    Complete(kOther, ++others_);
    ASSERT_TRUE(taken.get_future().get().ok());
  }
  void CompleteLarge(uint64_t sequence) {
    ASSERT_TRUE(sidecar_->Send(ipc::Collected{kGroup, sequence, kBytes, kArena, 0, 0, ""}).ok());
  }
  static std::vector<int> Numbers(const std::vector<std::byte>& bytes) {
    std::vector<int> numbers;
    for (const std::byte byte : bytes) numbers.push_back(std::to_integer<int>(byte));
    return numbers;
  }

 private:
  uint64_t others_ = 0;
};

TEST_F(CollectedPartTest, IsCopiedBeforeTheRestIsThere) {
  std::vector<std::byte> got;
  std::promise<absl::Status> done;
  BeginLarge(&got, &done);
  SendPart(1, 5, 2);
  SendPart(1, 2, 1);
  EXPECT_EQ(Numbers(got), (std::vector<int>{0, 0, 3, 0, 0, 6, 7, 0}));
  CompleteLarge(1);
  EXPECT_TRUE(done.get_future().get().ok());
  EXPECT_EQ(Numbers(got), (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}));
}

// An earlier collective may still write to the same memory.
TEST_F(CollectedPartTest, WaitsForEarlierCollectivesOfItsGroup) {
  std::vector<std::byte> got[2];
  std::promise<absl::Status> done[2];
  for (int i = 0; i < 2; ++i) BeginLarge(&got[i], &done[i]);
  SendPart(2, 0, 4);
  EXPECT_EQ(Numbers(got[1]), std::vector<int>(kBytes, 0));
  for (const uint64_t sequence : {1, 2}) CompleteLarge(sequence);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(done[i].get_future().get().ok());
    EXPECT_EQ(Numbers(got[i]), (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}));
  }
}

TEST_F(CollectedPartTest, ClosedSessionKeepsNoMemoryOfCollectives) {
  const auto mapped = [] {
    std::ifstream maps("/proc/self/maps");
    const std::string all(std::istreambuf_iterator<char>(maps), {});
    return all.find("memfd:results") != std::string::npos;
  };
  std::vector<std::byte> got;
  std::promise<absl::Status> done;
  BeginLarge(&got, &done);
  CompleteLarge(1);
  ASSERT_TRUE(done.get_future().get().ok());
  EXPECT_TRUE(mapped());
  session_->Close();
  EXPECT_FALSE(mapped());
}

TEST_F(CollectedPartTest, BeyondTheResultEndsTheSession) {
  std::vector<std::byte> got;
  std::promise<absl::Status> done;
  BeginLarge(&got, &done);
  ASSERT_TRUE(sidecar_->Send(ipc::CollectedPart{kGroup, 1, kArena, 0, 7, 2}).ok());
  const absl::Status status = done.get_future().get();
  EXPECT_NE(std::string(status.message()).find("names bytes 7 to 9 of collective 1"),
            std::string::npos)
      << status;
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
}  // namespace thalweg::sidecar_session_test
