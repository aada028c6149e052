// These tests take messages between workers through sidecars and shards, with real arenas and
// sockets. ThreadSanitizer checks them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <string>
#include <vector>

#include "core/base/thread.h"
#include "tests/integration/worker_groups.h"

namespace thalweg::messages_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Outcome = std::future<absl::Status>;

Outcome Exchange(Session& session, PeerCall call, Duration timeout = std::chrono::seconds(60)) {
  call.group = 1;
  call.timeout = timeout;
  auto outcome = std::make_shared<std::promise<absl::Status>>();
  session.Exchange(std::move(call), [outcome](const absl::Status& s) { outcome->set_value(s); });
  return outcome->get_future();
}

Outcome Send(Session& session, uint32_t to, uint64_t tag, const Integers& values) {
  return Exchange(session, {.peer = to, .tag = tag, .given = std::as_bytes(std::span(values))});
}

Outcome Receive(Session& session, std::optional<uint32_t> from, uint64_t tag, Integers* values,
                std::function<void(uint32_t)> source = nullptr) {
  return Exchange(session, {.way = PeerCall::Way::kReceive,
                            .peer = from,
                            .tag = tag,
                            .got = std::as_writable_bytes(std::span(*values)),
                            .from = std::move(source)});
}

struct Shape {
  uint32_t nodes, workers, shards;
  bool hosted = false;
};

class MessagesTest : public ::testing::TestWithParam<Shape> {
 protected:
  std::vector<std::unique_ptr<Session>> Sessions(Cluster& cluster) {
    auto sessions = Connect(cluster, GetParam().hosted);
    MakeGroup(sessions, 1, GetParam().workers);
    return sessions;
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, MessagesTest,
                         ::testing::Values(Shape{1, 2, 1}, Shape{2, 1, 1}, Shape{2, 2, 3, true}));

// The values of one pair of workers' messages.
Integers Pattern(uint32_t from, uint32_t to, uint64_t number, uint64_t elems) {
  return Integers(elems, static_cast<int64_t>(from * 1'000'000 + to * 1000 + number));
}

// Sizes travel in the message, with the offer, and in several requests.
TEST_P(MessagesTest, EverybodyGetsWhatEverybodySendsWhateverTheOrder) {
  constexpr uint64_t kSizes[] = {0, 3, 5000, 600'000};
  Cluster cluster(GetParam().nodes, GetParam().workers, GetParam().shards);
  auto sessions = Sessions(cluster);
  const auto size = static_cast<uint32_t>(sessions.size());
  std::vector<Thread> threads;
  for (uint32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back("worker", [&, rank] {
      Session& session = *sessions[rank];
      std::vector<Outcome> done;
      std::vector<Integers> expected, got;
      got.reserve(size * std::size(kSizes));
      const auto receive = [&](uint64_t number) {
        for (uint32_t from = 0; from < size; ++from) {
          expected.push_back(Pattern(from, rank, number, kSizes[number]));
          got.emplace_back(kSizes[number], -1);
          done.push_back(Receive(session, from, number, &got.back()));
        }
      };
      if (rank % 2 == 0) receive(3);  // before it is sent, and last of all
      for (uint64_t number = 0; number < std::size(kSizes); ++number) {
        for (uint32_t to = 0; to < size; ++to) {
          done.push_back(Send(session, to, number, Pattern(rank, to, number, kSizes[number])));
        }
      }
      if (rank % 2 == 1) receive(3);
      for (const uint64_t number : {2, 0, 1}) receive(number);
      for (Outcome& outcome : done) {
        const absl::Status status = outcome.get();
        ASSERT_TRUE(status.ok()) << status;
      }
      EXPECT_EQ(got, expected);
    });
  }
}

TEST_P(MessagesTest, MessagesOfOneTagArriveInTheirOrder) {
  constexpr int kMessages = 500;  // more than the letters that may be on the way
  Cluster cluster(GetParam().nodes, GetParam().workers, GetParam().shards);
  auto sessions = Sessions(cluster);
  const auto last = static_cast<uint32_t>(sessions.size() - 1);
  std::vector<Outcome> sent;
  for (int i = 0; i < kMessages; ++i) {
    sent.push_back(Send(*sessions[0], last, 7, Integers(i % 3 == 0 ? 9000 : 2, i)));
  }
  Integers other(2);
  auto passed_by = Send(*sessions[0], last, 8, Integers(2, 42));
  ASSERT_TRUE(Receive(*sessions[last], 0, 8, &other).get().ok());
  EXPECT_EQ(other, Integers(2, 42));
  for (int i = 0; i < kMessages; ++i) {
    Integers got(i % 3 == 0 ? 9000 : 2);
    const absl::Status status = Receive(*sessions[last], 0, 7, &got).get();
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(got, Integers(got.size(), i)) << "message " << i;
  }
  for (Outcome& outcome : sent) EXPECT_TRUE(outcome.get().ok());
  EXPECT_EQ(cluster.registry().GetCounter("thalweg_sidecar_collectives_total", "").Value(),
            kMessages + 1);
}

TEST_P(MessagesTest, ReceiveFromAnyoneSaysWhoSent) {
  Cluster cluster(GetParam().nodes, GetParam().workers, GetParam().shards);
  auto sessions = Sessions(cluster);
  const auto size = static_cast<uint32_t>(sessions.size());
  std::vector<Outcome> sent;
  for (uint32_t rank = 1; rank < size; ++rank) {
    sent.push_back(Send(*sessions[rank], 0, 1, Pattern(rank, 0, 1, 3000)));
  }
  std::set<uint32_t> sources;
  for (uint32_t i = 1; i < size; ++i) {
    Integers got(3000);
    uint32_t source = 0;
    ASSERT_TRUE(Receive(*sessions[0], std::nullopt, 1, &got, [&](uint32_t rank) { source = rank; })
                    .get()
                    .ok());
    EXPECT_EQ(got, Pattern(source, 0, 1, 3000));
    sources.insert(source);
  }
  EXPECT_EQ(sources.size(), size - 1);
  for (Outcome& outcome : sent) EXPECT_TRUE(outcome.get().ok());
}

// Neither side of a pair can go on to its second call before the other's first has passed.
TEST_P(MessagesTest, MessageAndCollectiveInOppositeOrdersFinish) {
  Cluster cluster(GetParam().nodes, GetParam().workers, GetParam().shards);
  auto sessions = Sessions(cluster);
  const auto last = static_cast<uint32_t>(sessions.size() - 1);
  const Integers given(100'000, 5);
  Integers got(given.size());
  auto sent = Send(*sessions[0], last, 0, given);
  const auto barrier = [](Session& session) {
    return Begin(session, {.group = 1, .kind = CollectiveKind::kBarrier}, {}, nullptr);
  };
  std::vector<Outcome> barriers;
  for (auto& session : sessions) barriers.push_back(barrier(*session));
  for (Outcome& outcome : barriers) ASSERT_TRUE(outcome.get().ok());
  ASSERT_TRUE(Receive(*sessions[last], 0, 0, &got).get().ok());
  EXPECT_TRUE(sent.get().ok());
  EXPECT_EQ(got, given);
}

TEST_P(MessagesTest, OtherSizeIsToldToBothSides) {
  Cluster cluster(GetParam().nodes, GetParam().workers, GetParam().shards);
  auto sessions = Sessions(cluster);
  const auto last = static_cast<uint32_t>(sessions.size() - 1);
  Integers got(3);
  auto received = Receive(*sessions[last], 0, 4, &got);
  auto sent = Send(*sessions[0], last, 4, Integers(20'000, 1));
  EXPECT_THAT(std::string(received.get().message()),
              AllOf(HasSubstr("rank 0 sends 160000 bytes"),
                    HasSubstr("receive of 24 bytes with tag 4 from rank 0"), HasSubstr("group1")));
  EXPECT_FALSE(sent.get().ok());
}

TEST_P(MessagesTest, ReceiveOfNothingEndsWithItsNameAfterTheTimeout) {
  Cluster cluster(GetParam().nodes, GetParam().workers, GetParam().shards);
  auto sessions = Sessions(cluster);
  Integers got(3);
  PeerCall call{.way = PeerCall::Way::kReceive, .peer = 0, .tag = 9};
  call.got = std::as_writable_bytes(std::span(got));
  const absl::Status status =
      Exchange(*sessions.back(), std::move(call), std::chrono::milliseconds(200)).get();
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("receive of 24 bytes with tag 9 from rank 0"),
                    HasSubstr("did not come within the timeout of 0.2 s")));
}

}  // namespace
}  // namespace thalweg::messages_test
