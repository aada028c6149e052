// These tests take collectives of groups of workers through sidecars and shards, with real arenas
// and sockets. ThreadSanitizer checks them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <numeric>
#include <vector>

#include "core/base/thread.h"
#include "tests/integration/worker_groups.h"

namespace thalweg::collectives_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Shape {
  uint32_t nodes, workers, shards;
  bool hosted = false;
};

class CollectivesTest : public ::testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(Shapes, CollectivesTest,
                         ::testing::Values(Shape{1, 1, 1}, Shape{1, 3, 1}, Shape{2, 2, 1},
                                           Shape{3, 1, 3, true}, Shape{2, 2, 3, true}));

// The sizes need no arena, one arena, and several blocks of one.
TEST_P(CollectivesTest, AllWorkersGetTheRightValuesFromManyInFlight) {
  const Shape shape = GetParam();
  Cluster cluster(shape.nodes, shape.workers, shape.shards);
  auto sessions = Connect(cluster, shape.hosted);
  MakeGroup(sessions, 1, shape.workers);
  const auto size = static_cast<uint32_t>(sessions.size());
  std::vector<Thread> threads;
  for (uint32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back("worker", [&, rank] {
      for (const uint64_t elems : {uint64_t{3}, uint64_t{5000}, uint64_t{70'000}}) {
        Integers sums(elems), gathered(elems * size), scattered(elems), mine(elems, rank + 1);
        Integers parts(elems * size);
        for (uint64_t i = 0; i < parts.size(); ++i) parts[i] = static_cast<int64_t>(i / elems);
        std::vector<std::future<absl::Status>> done;
        const auto call = [&](CollectiveKind kind, Fold fold) {
          return CollectiveCall{.group = 1, .kind = kind, .fold = fold, .elems = elems};
        };
        Session& session = *sessions[rank];
        done.push_back(Begin(session, call(CollectiveKind::kAllReduce, Fold::kSum), mine, &sums));
        done.push_back(
            Begin(session, call(CollectiveKind::kAllGather, Fold::kNone), mine, &gathered));
        done.push_back(
            Begin(session, call(CollectiveKind::kReduceScatter, Fold::kSum), parts, &scattered));
        done.push_back(Begin(session, {.group = 1, .kind = CollectiveKind::kBarrier}, {}, nullptr));
        for (auto& outcome : done) {
          const absl::Status status = outcome.get();
          ASSERT_TRUE(status.ok()) << status;
        }
        EXPECT_EQ(sums, Integers(elems, size * (size + 1) / 2));
        EXPECT_EQ(scattered, Integers(elems, rank * size));
        for (uint64_t i = 0; i < gathered.size(); ++i) {
          ASSERT_EQ(gathered[i], static_cast<int64_t>(i / elems + 1));
        }
      }
    });
  }
  threads.clear();
  EXPECT_EQ(cluster.registry().GetCounter("thalweg_sidecar_collectives_total", "").Value(),
            3 * 4 * shape.nodes);
}

// A worker's values lie in its arena while other nodes still receive them: it is used again only
// afterwards, however early the worker begins the next collective.
TEST_F(CollectivesTest, ValuesInFlightAreNotOverwrittenByTheNextOnes) {
  constexpr uint64_t kElems = 40'000;
  constexpr int kRounds = 30;
  Cluster cluster(3, 1, 3);
  auto sessions = Connect(cluster, /*hosted=*/true);
  MakeGroup(sessions, 1, 1);
  std::vector<Thread> threads;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back("worker", [&, rank] {
      for (int round = 0; round < kRounds; ++round) {
        Integers got(3 * kElems);
        const Integers given(kElems, 100 * round + rank);
        const CollectiveCall call{.group = 1, .kind = CollectiveKind::kAllGather, .elems = kElems};
        const absl::Status status = Begin(*sessions[rank], call, given, &got).get();
        ASSERT_TRUE(status.ok()) << status;
        for (uint64_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(got[i], 100 * round + static_cast<int64_t>(i / kElems)) << "round " << round;
        }
      }
    });
  }
}

TEST_F(CollectivesTest, GroupsUsedInOppositeOrdersOnTwoNodesFinish) {
  constexpr int kRounds = 40;
  Cluster cluster(2, 1, 2);
  auto sessions = Connect(cluster, /*hosted=*/true);
  MakeGroup(sessions, 1, 1);
  MakeGroup(sessions, 2, 1);
  std::vector<Thread> threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back("worker", [&, rank] {
      const Integers ones(3000, 1);
      std::vector<Integers> got(2 * kRounds, Integers(3000));
      std::vector<std::future<absl::Status>> done;
      for (const uint32_t group : rank == 0 ? std::vector{1u, 2u} : std::vector{2u, 1u}) {
        for (int round = 0; round < kRounds; ++round) {
          const CollectiveCall call{.group = group,
                                    .kind = CollectiveKind::kAllReduce,
                                    .fold = Fold::kSum,
                                    .elems = ones.size()};
          done.push_back(Begin(*sessions[rank], call, ones, &got[done.size()]));
        }
      }
      for (auto& outcome : done) ASSERT_TRUE(outcome.get().ok());
      for (const Integers& values : got) EXPECT_EQ(values, Integers(3000, 2));
    });
  }
}

// All collectives are of one size, and each rank's threads begin them in an order of chance.
TEST_P(CollectivesTest, CallbacksBeginAndAwaitCollectivesWhileOtherThreadsDo) {
  constexpr int kRounds = 20;
  const Shape shape = GetParam();
  Cluster cluster(shape.nodes, shape.workers, shape.shards);
  auto sessions = Connect(cluster, shape.hosted);
  MakeGroup(sessions, 1, shape.workers);
  const auto size = static_cast<int64_t>(sessions.size());
  const auto sum = [](Session& session, int64_t value, Integers& got) {
    const CollectiveCall call{
        .group = 1, .kind = CollectiveKind::kAllReduce, .fold = Fold::kSum, .elems = 100};
    return Begin(session, call, Integers(100, value), &got);
  };
  std::vector<Thread> threads;
  for (const auto& session : sessions) {
    threads.emplace_back("worker", [&] {
      std::vector<Integers> inner(kRounds, Integers(100));
      std::vector<Integers> outer(kRounds, Integers(100));
      std::vector<std::promise<absl::Status>> done(kRounds);
      const Integers ones(100, 1);
      for (int round = 0; round < kRounds; ++round) {
        CollectiveCall call{.group = 1,
                            .kind = CollectiveKind::kAllReduce,
                            .fold = Fold::kSum,
                            .dtype = DType::kInt64,
                            .elems = 100,
                            .timeout = std::chrono::seconds(60)};
        call.given = {std::as_bytes(std::span(ones))};
        call.got = {std::as_writable_bytes(std::span(outer[round]))};
        session->Collect(std::move(call), [&, round](const absl::Status&) {
          done[round].set_value(sum(*session, 1000 + round, inner[round]).get());
        });
      }
      for (auto& outcome : done) ASSERT_TRUE(outcome.get_future().get().ok());
      for (int round = 0; round < kRounds; ++round) {
        EXPECT_EQ(outer[round], Integers(100, size));
        EXPECT_EQ(inner[round], Integers(100, size * (1000 + round)));
      }
    });
  }
}

TEST_F(CollectivesTest, WorkersThatDisagreeAllGetTheReason) {
  Cluster cluster(1, 2, 1);
  auto sessions = Connect(cluster, /*hosted=*/false);
  MakeGroup(sessions, 1, 2);
  std::vector<Integers> got(2, Integers(4));
  std::vector<std::future<absl::Status>> done;
  const std::vector<Integers> given = {Integers(4, 1), Integers(3, 1)};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    done.push_back(Begin(*sessions[rank],
                         {.group = 1,
                          .kind = CollectiveKind::kAllReduce,
                          .fold = Fold::kSum,
                          .elems = given[rank].size()},
                         given[rank], &got[rank]));
  }
  for (auto& outcome : done) {
    EXPECT_THAT(std::string(outcome.get().message()),
                AllOf(HasSubstr("collective 1 of group 'group1'"), HasSubstr("4 elements"),
                      HasSubstr("3 elements")));
  }
}

TEST_F(CollectivesTest, WhatCannotBeIsRefusedByTheSidecar) {
  const std::vector<std::pair<CollectiveCall, std::string>> cases = {
      {{.group = 1, .kind = CollectiveKind::kAllReduce, .fold = Fold::kMean, .elems = 4},
       "integers of type int64 have no mean"},
      {{.group = 1, .kind = CollectiveKind::kAllReduce, .fold = Fold::kNone, .elems = 4},
       "there is no allreduce with fold bytes"},
      {{.group = 1, .kind = CollectiveKind::kBroadcast, .root = 2, .elems = 4}, "root 2"},
      {{.group = 1, .kind = CollectiveKind::kBarrier, .elems = uint64_t{1} << 60}, "elements"},
      {{.group = 2, .kind = CollectiveKind::kBarrier}, "is in no group 2"},
  };
  for (const auto& [call, why] : cases) {
    Cluster cluster(1, 1, 1);
    auto sessions = Connect(cluster, /*hosted=*/false);
    MakeGroup(sessions, 1, 1);
    Integers got(4);
    const absl::Status status = Begin(*sessions[0], call, Integers(4, 1), &got).get();
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
}

TEST_F(CollectivesTest, AbsentWorkerIsNamedWithinTheCollectivesTimeout) {
  for (const Shape shape : {Shape{1, 2, 1}, Shape{2, 1, 1}}) {
    Cluster cluster(shape.nodes, shape.workers, shape.shards);
    auto sessions = Connect(cluster, /*hosted=*/false);
    MakeGroup(sessions, 1, shape.workers);
    Integers got(4);
    const CollectiveCall call{.group = 1,
                              .kind = CollectiveKind::kAllReduce,
                              .fold = Fold::kSum,
                              .elems = 4,
                              .timeout = std::chrono::milliseconds(500)};
    const absl::Status status = Begin(*sessions[0], call, Integers(4, 1), &got).get();
    EXPECT_THAT(
        std::string(status.message()),
        HasSubstr(shape.workers == 2 ? "allreduce 1 of group 'group1': rank 1 of the group"
                                     : "collective 1 of group 1 chunk 0 waited 0.5 s for node 1"));
  }
}

TEST_F(CollectivesTest, WorkerThatLeavesBeforeACollectiveFailsItForTheOthers) {
  Cluster cluster(1, 2, 1);
  auto sessions = Connect(cluster, /*hosted=*/false);
  MakeGroup(sessions, 1, 2);
  Integers got(4);
  const CollectiveCall call{
      .group = 1, .kind = CollectiveKind::kAllReduce, .fold = Fold::kSum, .elems = 4};
  auto outcome = Begin(*sessions[0], call, Integers(4, 1), &got);
  sessions[1]->Close();
  EXPECT_THAT(std::string(outcome.get().message()),
              AllOf(HasSubstr("rank 1"), HasSubstr("allreduce 1 of group 'group1' waits for it")));
}

}  // namespace
}  // namespace thalweg::collectives_test
