// These tests take groups of nodes through collectives on shards, without workers: what the session
// and the process group will stand on. ThreadSanitizer checks them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "core/base/testing/test_patience.h"
#include "core/base/thread.h"
#include "server/aggregator/aggregator.h"
#include "server/base/metrics.h"
#include "server/shards/shard_group.h"

namespace thalweg::groups_test {
namespace {

constexpr uint64_t kElems = 64;

using Values = std::vector<float>;

Payload PayloadOf(const Values& values) {
  const auto owner = std::make_shared<const Values>(values);
  return Payload(std::as_bytes(std::span(*owner)), owner);
}
Values ValuesOf(const Payload& payload) {
  Values values(payload.SizeBytes() / sizeof(float));
  auto* out = reinterpret_cast<std::byte*>(values.data());
  for (const auto& piece : payload.pieces) {
    std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
  return values;
}

// What a node gives to round `sequence` of a group.
Values ShareOf(uint32_t node, uint32_t group, uint64_t sequence) {
  Values values(kElems);
  for (uint64_t i = 0; i < kElems; ++i) {
    values[i] = static_cast<float>(uint64_t{1000} * group + 10 * sequence + i) *
                static_cast<float>(node + 1);
  }
  return values;
}

// One node of a job, with a ShardGroup of its own.
class Node {
 public:
  Node(uint32_t number, const std::vector<Shard*>& shards, MetricRegistry& metrics)
      : number_(number), shards_(shards, metrics) {}
  ~Node() { shards_.Leave(absl::OkStatus()); }

  void Join(uint32_t num_nodes) {
    JoinRequest request;
    request.job = "job";
    request.node = number_;
    request.node_name = "host";
    request.workers = 1;
    request.num_nodes = num_nodes;
    request.world_size = num_nodes;
    request.chunk_bytes = 4096;
    request.window_chunks = 2;
    request.round_timeout = kTestPatience;
    const absl::Status joined = shards_.Join(
        request, [this](uint32_t shard) { return std::make_shared<Listener>(*this, shard); },
        Now() + kTestPatience);
    ASSERT_TRUE(joined.ok()) << joined;
  }
  void MakeGroup(const Group& group) {
    const absl::Status made = shards_.MakeGroup(group, Now() + kTestPatience);
    ASSERT_TRUE(made.ok()) << made;
  }
  // Takes part in a one-shot round, which shard sequence % shards folds.
  void TakePart(uint32_t group, uint64_t sequence, const Collective& collective) {
    Contribution contribution;
    contribution.id = {OneShotsOf(group), 0, sequence};
    contribution.elems = kElems;
    contribution.group = group;
    contribution.collective = collective;
    contribution.settled = Settled(group);
    if (collective.from.Has(number_)) {
      contribution.payload = PayloadOf(ShareOf(number_, group, sequence));
    }
    const uint32_t shard = static_cast<uint32_t>(sequence % shards_.size());
    const absl::Status sent = shards_.Contribute(shard, std::move(contribution));
    ASSERT_TRUE(sent.ok()) << sent;
  }
  // Waits until rounds 1 to `count` of the group have results.
  bool WaitFor(uint32_t group, uint64_t count) {
    MutexLock lock(mutex_);
    return changed_.WaitUntil(mutex_, Now() + kTestPatience,
                              [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                return !failure_.ok() || results_[group].size() >= count;
                              }) &&
           failure_.ok();
  }
  Values Result(uint32_t group, uint64_t sequence) {
    MutexLock lock(mutex_);
    return results_[group].at(sequence);
  }
  absl::Status failure() {
    MutexLock lock(mutex_);
    return failure_;
  }

 private:
  class Listener : public MemberEvents {
   public:
    Listener(Node& node, uint32_t shard) : node_(node), shard_(shard) {}
    void OnResult(RoundResult result) override { node_.OnResult(shard_, result); }
    void OnFailed(absl::Status why) override {
      MutexLock lock(node_.mutex_);
      node_.failure_ = why;
      node_.changed_.NotifyAll();
    }

   private:
    Node& node_;
    const uint32_t shard_;
  };

  void OnResult(uint32_t shard, const RoundResult& result) {
    const uint32_t group = result.id.bucket.generation;
    {
      MutexLock lock(mutex_);
      results_[group][result.id.round] = ValuesOf(result.payload);
      changed_.NotifyAll();
    }
    const absl::Status sent = shards_.OnAnswered(shard, group, 0);
    ASSERT_TRUE(sent.ok()) << sent;
  }
  uint64_t Settled(uint32_t group) {
    MutexLock lock(mutex_);
    uint64_t& settled = settled_[group];
    while (results_[group].contains(settled + 1)) ++settled;
    return settled;
  }

  const uint32_t number_;
  ShardGroup shards_;
  Mutex mutex_;
  CondVar changed_;
  std::map<uint32_t, std::map<uint64_t, Values>> results_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, uint64_t> settled_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

class GroupsTest : public ::testing::Test {
 protected:
  void Start(uint32_t num_nodes, const std::vector<Group>& groups) {
    for (int k = 0; k < 2; ++k) {
      aggregators_.push_back(std::make_unique<Aggregator>(Aggregator::Options(), metrics_));
    }
    const std::vector<Shard*> shards{aggregators_[0].get(), aggregators_[1].get()};
    for (uint32_t n = 0; n < num_nodes; ++n) {
      nodes_.push_back(std::make_unique<Node>(n, shards, metrics_));
    }
    std::vector<Thread> threads;
    for (auto& node : nodes_) {
      threads.emplace_back("node", [&node, num_nodes] { node->Join(num_nodes); });
    }
    threads.clear();
    for (const Group& group : groups) {
      for (const GroupMember& member : group.members) nodes_[member.node]->MakeGroup(group);
    }
  }

  MetricRegistry metrics_;
  std::vector<std::unique_ptr<Aggregator>> aggregators_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

// Either node's first 50 rounds fill every window that its groups could share.
TEST_F(GroupsTest, GroupsUsedInOppositeOrdersOnTwoNodesFinish) {
  constexpr uint64_t kRounds = 50;
  const std::vector<GroupMember> both{{0, 1}, {1, 1}};
  Start(2, {{1, both}, {2, both}});
  const Collective sum{{}, {}, Fold::kSum};
  std::vector<Thread> threads;
  for (uint32_t n = 0; n < 2; ++n) {
    threads.emplace_back("node", [this, n, &sum] {
      for (const uint32_t group : n == 0 ? std::vector{1u, 2u} : std::vector{2u, 1u}) {
        for (uint64_t s = 1; s <= kRounds; ++s) nodes_[n]->TakePart(group, s, sum);
      }
    });
  }
  threads.clear();
  for (auto& node : nodes_) {
    for (const uint32_t group : {1u, 2u}) {
      ASSERT_TRUE(node->WaitFor(group, kRounds)) << node->failure();
      const Values result = node->Result(group, kRounds);
      ASSERT_EQ(result.size(), kElems);
      EXPECT_EQ(result[5], 3 * ShareOf(0, group, kRounds)[5]);
    }
  }
}

// Returns what a group does in one of its rounds; all nodes agree.
Collective CollectiveOf(const Group& group, uint64_t sequence) {
  std::mt19937_64 random(uint64_t{group.id} * 1000 + sequence);
  const auto any = [&] { return Place::One(group.members[random() % group.members.size()].node); };
  switch (random() % 5) {
    case 0:
      return {Place::All(), Place::All(), Fold::kSum};
    case 1:
      return {Place::All(), any(), Fold::kMax};
    case 2:
      return {any(), Place::All(), Fold::kNone};
    case 3: {
      const Place from = any();
      return {from, any(), Fold::kNone};
    }
    default:
      return {Place::None(), Place::None(), Fold::kNone};
  }
}

// Returns what a node of the group gets from such a round.
Values Expected(const Group& group, uint64_t sequence, const Collective& what, uint32_t node) {
  if (!what.to.Has(node)) return {};
  Values expected;
  for (const GroupMember& member : group.members) {
    if (!what.from.Has(member.node)) continue;
    const Values share = ShareOf(member.node, group.id, sequence);
    if (expected.empty()) {
      expected = share;
      continue;
    }
    for (uint64_t i = 0; i < kElems; ++i) {
      expected[i] =
          what.fold == Fold::kSum ? expected[i] + share[i] : std::max(expected[i], share[i]);
    }
  }
  return expected;
}

TEST_F(GroupsTest, ThreadsUsingOverlappingGroupsGetTheRightBytes) {
  constexpr uint64_t kRounds = 200;
  const std::vector<Group> groups{
      {1, {{0, 1}, {1, 1}}}, {2, {{1, 1}, {2, 1}}, 5}, {3, {{0, 1}, {1, 1}, {2, 1}}}};
  Start(3, groups);
  std::vector<Thread> threads;
  for (const Group& group : groups) {
    for (const GroupMember& member : group.members) {
      threads.emplace_back("node", [&node = *nodes_[member.node], &group] {
        for (uint64_t s = 1; s <= kRounds; ++s) {
          node.TakePart(group.id, s, CollectiveOf(group, s));
        }
      });
    }
  }
  threads.clear();
  for (const Group& group : groups) {
    for (const auto& [n, workers] : group.members) {
      ASSERT_TRUE(nodes_[n]->WaitFor(group.id, kRounds)) << nodes_[n]->failure();
      for (uint64_t s = 1; s <= kRounds; ++s) {
        const Collective what = CollectiveOf(group, s);
        ASSERT_EQ(nodes_[n]->Result(group.id, s), Expected(group, s, what, n))
            << ToString(what) << " in round " << s << " of group " << group.id << " at node " << n;
      }
    }
  }
}

TEST_F(GroupsTest, ThousandsOfRoundsLeaveNothingHeld) {
  constexpr uint64_t kRounds = 3000;
  const std::vector<GroupMember> both{{0, 1}, {1, 1}};
  Start(2, {{1, both}});
  for (uint64_t s = 1; s <= kRounds; ++s) {
    for (auto& node : nodes_) node->TakePart(1, s, {{}, {}, Fold::kMin});
  }
  for (auto& node : nodes_) ASSERT_TRUE(node->WaitFor(1, kRounds)) << node->failure();
  EXPECT_EQ(metrics_.GetGauge("thalweg_shard_held_bytes", "").Value(), 0);
}

}  // namespace
}  // namespace thalweg::groups_test
