#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>

#include "kernels/optim/factors_scalar.h"
#include "kernels/optim/optim.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::job_apart_test {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr BucketId kBucket{3, 0, 0};
constexpr uint64_t kElems = 40;
constexpr double kRate = 0.1;
constexpr double kMomentum = 0.9;

Floats Values(uint32_t node, uint64_t round) {
  std::mt19937 random(1000 * node + static_cast<uint32_t>(round));
  std::uniform_real_distribution<float> values(-1, 1);
  Floats made(kElems);
  for (float& value : made) value = values(random);
  return made;
}

UpdateRule Alone() {
  UpdateRule rule;
  rule.alone = true;
  return rule;
}

UpdateRule Ahead(uint32_t rounds) {
  UpdateRule rule;
  rule.ahead = rounds;
  return rule;
}

// A Fold is what one process computes that takes gradients one after the other: SGD with momentum,
// whose result depends on their order.
class Fold {
 public:
  void Add(const Floats& gradient, double rate = kRate) {
    SgdSettings settings;
    settings.lr = rate;
    settings.momentum = kMomentum;
    SgdTensor tensor;
    tensor.elems = kElems;
    tensor.param = weights_.data();
    tensor.grad = gradient.data();
    tensor.states[0] = momentum_.data();
    tensor.factors = FactorsOf(settings, ++steps_ == 1, 1);
    FlatIndex index;
    index.Add(tensor.elems, StepBytes(tensor));
    const std::vector<SgdTensor> tensors = {tensor};
    RunSgd(tensors, index, 0, index.Size());
  }
  const Floats& weights() const { return weights_; }

 private:
  Floats weights_ = Values(9, 9);
  Floats momentum_ = Floats(kElems);
  int steps_ = 0;
};

// Nodes that each contribute one round after the other: the next one when they have the result.
class JobApartTest : public ::testing::Test {
 protected:
  void Begin(UpdateRule rule, std::vector<uint32_t> workers = {1, 1, 1, 1}) {
    rule.groups = {0};
    test_ = std::make_unique<TestJob>(std::move(workers));
    for (uint32_t node = 0; node < nodes(); ++node) {
      BucketAnnouncement bucket{kBucket, {DType::kFloat32, {{"w", {kElems}}}}};
      bucket.raw_bytes = kElems * sizeof(float);
      bucket.update = rule;
      ASSERT_TRUE(test_->job().RegisterBucket(node, bucket).ok());
      ASSERT_TRUE(test_->job().SetSettings(node, 1, Settings(kRate)).ok());
    }
    ASSERT_TRUE(test_->job().WriteWeights(0, kBucket, 0, 0, {Fold().weights(), 0}).ok());
    rounds_.assign(nodes(), 0);
  }
  static UpdateStep Settings(double rate) { return {{{.lr = rate, .momentum = kMomentum}}}; }

  uint32_t nodes() const { return static_cast<uint32_t>(test_->workers().size()); }
  size_t results(uint32_t node) { return test_->sink(node).results.size(); }
  Floats result(uint32_t node, uint64_t round) {
    const RoundResult& found = test_->sink(node).results.at(round - 1);
    EXPECT_EQ(found.id, (RoundId{kBucket, 0, round}));
    return DecodedFloats(found.payload);
  }
  absl::Status Contribute(uint32_t node, uint64_t round, uint64_t settings = 1) {
    Contribution contribution{{kBucket, 0, round},
                              1,
                              WireFormat::kFloat32,
                              kElems,
                              Split(EncodedFloats(Values(node, round)), {})};
    contribution.settings = settings;
    return test_->job().Contribute(node, std::move(contribution), Now());
  }
  // Lets a node contribute its next round, if it has the result of the last one.
  bool Advance(uint32_t node) {
    if (results(node) < rounds_[node]) return false;
    EXPECT_TRUE(Contribute(node, ++rounds_[node]).ok());
    return true;
  }
  double Count(const char* name, const Labels& labels) {
    return test_->registry().GetCounter(name, "", labels).Value();
  }

  std::unique_ptr<TestJob> test_;
  std::vector<uint64_t> rounds_;  // by node: those that it has contributed to
};

// Returns the weights after each step of means, from those before the first one.
std::vector<Floats> FoldOfMeans(uint32_t nodes, uint64_t steps) {
  Fold fold;
  std::vector<Floats> versions = {fold.weights()};
  for (uint64_t step = 1; step <= steps; ++step) {
    Floats mean(kElems);
    for (uint32_t node = 0; node < nodes; ++node) {
      const Floats gradient = Values(node, step);
      for (uint64_t i = 0; i < kElems; ++i) mean[i] += gradient[i];
    }
    for (float& value : mean) value *= 1.0f / static_cast<float>(nodes);
    fold.Add(mean);
    versions.push_back(fold.weights());
  }
  return versions;
}

TEST_F(JobApartTest, NodesThatUpdateAloneWaitForNobodyAndWeightsAreTheFoldOfAllPushes) {
  Begin(Alone());
  std::mt19937 random(5);
  Fold fold;
  uint64_t version = 0;
  std::vector<uint64_t> seen(4), stale(4);
  for (int i = 0; i < 200; ++i) {
    const uint32_t node = random() % 10 < 8 ? 0 : 1 + random() % 3;
    ASSERT_TRUE(Advance(node));
    fold.Add(Values(node, rounds_[node]));
    stale[node] += version - seen[node];
    seen[node] = ++version;
    ASSERT_EQ(results(node), rounds_[node]);
    EXPECT_EQ(result(node, rounds_[node]), fold.weights());
    // A connection that breaks brings contributions again.
    if (random() % 3 == 0) {
      ASSERT_TRUE(Contribute(node, rounds_[node]).ok());
    }
  }
  const auto read = test_->job().ReadWeights(0, kBucket, 0, 0);
  EXPECT_EQ(read->values, fold.weights());
  EXPECT_EQ(read->steps, 200u);
  for (uint32_t node = 0; node < nodes(); ++node) {
    EXPECT_EQ(results(node), rounds_[node]);  // none came twice
    EXPECT_EQ(Count("thalweg_shard_stale_updates_total", {{"node", absl::StrCat(node)}}),
              static_cast<double>(stale[node]));
  }
}

TEST_F(JobApartTest, NodesThatUpdateAloneMayLeaveBeforeTheOthers) {
  Begin(Alone(), {1, 2});
  ASSERT_TRUE(Advance(1));
  test_->job().RemoveMember(1, absl::OkStatus());
  ASSERT_TRUE(Advance(0));
  EXPECT_THAT(test_->sink(0).results, SizeIs(1));
}

TEST_F(JobApartTest, LoneContributionThatSkipsARoundFailsTheJob) {
  Begin(Alone());
  EXPECT_THAT(std::string(Contribute(1, 2).message()),
              HasSubstr("node 1 contributes to it after round 0"));
  EXPECT_THAT(test_->sink(0).failures, SizeIs(1));
}

TEST_F(JobApartTest, RateIsDividedByStalenessWhereTheRuleIsDelayAware) {
  UpdateRule rule = Alone();
  rule.delay_aware = true;
  Begin(rule, {1, 1});
  Fold fold;
  const auto push = [&](uint32_t node, double rate) {
    ASSERT_TRUE(Advance(node));
    fold.Add(Values(node, rounds_[node]), rate);
    EXPECT_EQ(result(node, rounds_[node]), fold.weights());
  };
  for (int i = 0; i < 4; ++i) push(0, kRate);  // nobody comes in between
  push(1, kRate / 4);
  push(0, kRate);
  push(1, kRate);
}

TEST_F(JobApartTest, EachLoneNodeHasSettingsOfItsOwn) {
  Begin(Alone(), {1, 1});
  const auto numbered = [](uint64_t node, uint64_t number) {
    return ((node + 1) << StepSettings::kSeriesBit) + number;
  };
  Fold fold;
  // The slow node's settings are wanted when the fast one has given more than a series keeps.
  ASSERT_TRUE(test_->job().SetSettings(1, numbered(1, 1), Settings(0.5)).ok());
  for (uint64_t step = 1; step <= 2 * StepSettings::kKept; ++step) {
    const double rate = kRate / static_cast<double>(step);
    ASSERT_TRUE(test_->job().SetSettings(0, numbered(0, step), Settings(rate)).ok());
    ASSERT_TRUE(Contribute(0, step, numbered(0, step)).ok());
    fold.Add(Values(0, step), rate);
  }
  ASSERT_TRUE(Contribute(1, 1, numbered(1, 1)).ok());
  fold.Add(Values(1, 1), 0.5);
  EXPECT_EQ(result(1, 1), fold.weights());
  EXPECT_THAT(std::string(test_->job().SetSettings(0, numbered(1, 2), Settings(0.5)).message()),
              HasSubstr("of another node"));
}

TEST_F(JobApartTest, NoNodeIsFurtherAheadThanItMayBeAndEachStepHasTheMeanOfAll) {
  for (const uint32_t ahead : {1u, 3u, 8u}) {
    Begin(Ahead(ahead));
    std::mt19937 random(ahead);
    const std::vector<Floats> versions = FoldOfMeans(nodes(), 300);
    uint64_t furthest = 0;
    for (int i = 0; i < 600; ++i) {
      const uint32_t node = random() % 4 == 0 ? random() % 4 : (i / 100) % 4;
      const bool has_advanced = Advance(node);
      const uint64_t slowest = *std::min_element(rounds_.begin(), rounds_.end());
      furthest = std::max(furthest, rounds_[node] - slowest);
      // It goes on if and only if its last round's weights lack no more than they may.
      EXPECT_EQ(results(node) == rounds_[node], rounds_[node] <= slowest + ahead);
      if (!has_advanced) continue;
      if (random() % 3 == 0) {
        ASSERT_TRUE(Contribute(node, rounds_[node]).ok());
      }
    }
    EXPECT_EQ(furthest, ahead + 1);  // it has contributed, and waits
    for (uint32_t node = 0; node < nodes(); ++node) {
      uint64_t before = 0;
      for (uint64_t round = 1; round <= results(node); ++round) {
        const auto found = std::find(versions.begin(), versions.end(), result(node, round));
        ASSERT_NE(found, versions.end()) << "no fold of whole steps has these weights";
        const auto version = static_cast<uint64_t>(found - versions.begin());
        EXPECT_LE(round, version + ahead);
        EXPECT_GE(version, before);
        before = version;
      }
    }
  }
}

TEST_F(JobApartTest, NodesInStepGetTheBitsOfSynchronousOnes) {
  for (const uint32_t ahead : {0u, 4u}) {
    Begin(Ahead(ahead));
    const std::vector<Floats> versions = FoldOfMeans(nodes(), 20);
    for (uint64_t round = 1; round <= 20; ++round) {
      for (const uint32_t node : {2u, 0u, 3u, 1u}) ASSERT_TRUE(Advance(node));
      EXPECT_EQ(result(1, round), versions[round]);  // the last one to come
    }
    // Each node has got all weights in each round, at once or when it may have them.
    const double bytes = 20 * 4 * kElems * sizeof(float);
    EXPECT_EQ(Count("thalweg_shard_sent_bytes_total", {}), bytes);
    EXPECT_EQ(Count("thalweg_shard_sent_raw_bytes_total", {}), bytes);
  }
}

TEST_F(JobApartTest, DeadlineCountsFromWhenANodeWaits) {
  Begin(Ahead(2), {1, 1});
  const TimePoint begin = Now();
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(Advance(0));
  const auto hear = [&](TimePoint now) {
    for (const uint32_t node : {0u, 1u}) ASSERT_TRUE(test_->job().Heartbeat(node, now).ok());
  };
  const TimePoint later = begin + std::chrono::minutes(5);
  hear(later);
  test_->job().Tick(later);
  EXPECT_THAT(test_->sink(0).failures, SizeIs(0));  // nobody waits
  ASSERT_TRUE(Advance(0));
  hear(later);
  test_->job().Tick(later);
  ASSERT_THAT(test_->sink(0).failures, SizeIs(1));
  EXPECT_THAT(std::string(test_->sink(0).failures[0].message()),
              HasSubstr("bucket 3 round 1 chunk 0 waited 30 s for node 1 (host1)"));
}

TEST_F(JobApartTest, ContributionBeyondWhatRulesAllowFailsTheJob) {
  Begin(Ahead(2), {1, 1});
  ASSERT_TRUE(Contribute(0, 1).ok());
  EXPECT_THAT(std::string(Contribute(0, 3).message()),
              HasSubstr("but node 0 has not contributed to the round before"));

  Begin(Ahead(2), {1, 1});
  for (uint64_t round = 1; round <= 3; ++round) ASSERT_TRUE(Contribute(0, round).ok());
  EXPECT_THAT(std::string(Contribute(0, 4).message()), HasSubstr("round 1 is not complete"));
}

TEST_F(JobApartTest, WeightsInHalfPrecisionAreTheSameWhetherTheyComeEarlyOrNot) {
  UpdateRule rule = Ahead(1);
  rule.down = WireFormat::kBFloat16;
  Begin(rule, {1, 1});
  ASSERT_TRUE(Advance(0));
  ASSERT_TRUE(Advance(1));  // gets those after the step
  ASSERT_TRUE(Advance(1));  // gets the same, early
  const auto& given = test_->sink(1).results;
  ASSERT_THAT(given, SizeIs(2));
  EXPECT_EQ(BytesOf(given[0].payload), BytesOf(given[1].payload));
  EXPECT_EQ(given[1].wire, WireFormat::kBFloat16);
}

TEST_F(JobApartTest, MemoryOfWhatNodesContributeAheadIsReservedBeforehand) {
  TestJob small({1, 1}, 4 * 64 * kMinChunkBytes + (1 << 20));
  BucketAnnouncement bucket{kBucket, {DType::kFloat32, {{"w", {1 << 20}}}}};
  bucket.update = Ahead(3);
  bucket.update->groups = {0};
  // Weights and momentum, and four steps of two nodes.
  EXPECT_THAT(std::string(small.job().RegisterBucket(0, bucket).message()),
              HasSubstr(absl::StrCat((2 + 4 * 2) * (4 << 20), " for residuals and weights")));
}

}  // namespace
}  // namespace thalweg::job_apart_test
