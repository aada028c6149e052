#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/optim/factors_scalar.h"
#include "kernels/optim/optim.h"
#include "server/aggregator/job_test_util.h"

namespace thalweg::job_updates_test {
namespace {

using ::testing::HasSubstr;

constexpr BucketId kBucket{3, 0, 0};
constexpr uint64_t kElems = 600;
const BucketLayout kLayout{DType::kFloat32, {{"w", {500}}, {"b", {100}}}};

UpdateRule AdamW(WireFormat down = WireFormat::kFloat32) {
  UpdateRule rule;
  rule.optimizer = Optimizer::kAdam;
  rule.decoupled = true;
  rule.groups = {0, 1};
  rule.down = down;
  return rule;
}

UpdateStep Settings(double lr) {
  GroupStep weights{.lr = lr, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
  GroupStep biases = weights;
  biases.weight_decay = 0;
  return {{weights, biases}};
}

Floats Values(float first) {
  Floats values(kElems);
  for (uint64_t i = 0; i < kElems; ++i) values[i] = first + 0.25f * static_cast<float>(i % 17);
  return values;
}

class JobUpdatesTest : public ::testing::Test {
 protected:
  void Register(const UpdateRule& rule = AdamW()) {
    for (uint32_t node = 0; node < 2; ++node) {
      BucketAnnouncement bucket{kBucket, kLayout};
      bucket.update = rule;
      ASSERT_TRUE(test_.job().RegisterBucket(node, bucket).ok());
    }
  }
  absl::Status Contribute(uint32_t node, uint64_t round, const Floats& gradient,
                          uint64_t settings) {
    Contribution contribution{
        {kBucket, 0, round}, 1, WireFormat::kFloat32, kElems, Split(EncodedFloats(gradient), {})};
    contribution.settings = settings;
    return test_.job().Contribute(node, std::move(contribution), Now());
  }
  void SetSettings(uint64_t number, double lr) {
    for (uint32_t node = 0; node < 2; ++node) {
      ASSERT_TRUE(test_.job().SetSettings(node, number, Settings(lr)).ok());
    }
  }

  absl::Status Pull(uint32_t node, uint64_t round, uint64_t settings) {
    Contribution contribution{{kBucket, 0, round}, 1, WireFormat::kFloat32, kElems, Payload()};
    contribution.collective = kPull;
    contribution.settings = settings;
    return test_.job().Contribute(node, std::move(contribution), Now());
  }

  static absl::Status Write(TestJob& test, const Weights& weights) {
    absl::Status status;
    for (uint32_t slice = 0; slice <= 2 && status.ok(); ++slice) {
      const Floats& values = slice == 0 ? weights.params : weights.moments[slice - 1];
      status = test.job().WriteWeights(0, kBucket, 0, slice, {values, weights.steps});
    }
    return status;
  }
  static Weights Read(TestJob& test) {
    Weights weights;
    for (uint32_t slice = 0; slice <= 2; ++slice) {
      auto read = test.job().ReadWeights(0, kBucket, 0, slice);
      EXPECT_TRUE(read.ok()) << read.status();
      (slice == 0 ? weights.params : weights.moments[slice - 1]) = std::move(read->values);
      weights.steps = read->steps;
    }
    return weights;
  }

  TestJob test_{{1, 1}};
};

// What a worker computes that has the mean itself.
void StepLocally(Weights& weights, const Floats& mean, double lr) {
  ++weights.steps;
  for (Floats& moment : weights.moments) moment.resize(kElems);
  std::vector<AdamTensor> tensors;
  FlatIndex index;
  for (const auto& [begin, end, group] : {std::tuple{0, 500, 0}, std::tuple{500, 600, 1}}) {
    const GroupStep g = Settings(lr).groups[group];
    AdamSettings settings;
    settings.lr = g.lr;
    settings.weight_decay = g.weight_decay;
    settings.beta1 = g.beta1;
    settings.beta2 = g.beta2;
    settings.epsilon = g.eps;
    settings.decoupled = true;
    AdamTensor tensor;
    tensor.elems = static_cast<uint64_t>(end - begin);
    tensor.param = weights.params.data() + begin;
    tensor.grad = mean.data() + begin;
    tensor.states[0] = weights.moments[0].data() + begin;
    tensor.states[1] = weights.moments[1].data() + begin;
    tensor.factors =
        FactorsOf(settings, BiasCorrectionsAt(settings, static_cast<double>(weights.steps)), 1);
    index.Add(tensor.elems, StepBytes(tensor));
    tensors.push_back(tensor);
  }
  RunAdam(tensors, index, 0, index.Size());
}

TEST_F(JobUpdatesTest, ResultsAreTheWeightsOfWorkersThatUpdateThemselvesBitForBit) {
  Register();
  Weights expected{.params = Values(1)};
  ASSERT_TRUE(Write(test_, expected).ok());
  for (uint64_t round = 1; round <= 5; ++round) {
    const double lr = 0.1 / static_cast<double>(round);
    SetSettings(round, lr);
    const Floats first = Values(0.5f * static_cast<float>(round)), second = Values(-3);
    Floats mean(kElems);
    for (uint64_t i = 0; i < kElems; ++i) mean[i] = (first[i] + second[i]) * 0.5f;
    StepLocally(expected, mean, lr);
    ASSERT_TRUE(Contribute(1, round, second, round).ok());
    ASSERT_TRUE(Contribute(0, round, first, round).ok());
    for (uint32_t node = 0; node < 2; ++node) {
      ASSERT_EQ(test_.sink(node).results.size(), round);
      EXPECT_EQ(DecodedFloats(test_.sink(node).results.back().payload), expected.params);
    }
  }
  EXPECT_EQ(Read(test_), expected);
}

TEST_F(JobUpdatesTest, JobGoesOnFromWeightsThatWereRead) {
  Register();
  ASSERT_TRUE(Write(test_, {.params = Values(1)}).ok());
  SetSettings(1, 0.1);
  for (uint64_t round = 1; round <= 2; ++round) {
    for (uint32_t node = 0; node < 2; ++node) {
      ASSERT_TRUE(Contribute(node, round, Values(-1), 1).ok());
    }
  }
  const Weights halfway = Read(test_);
  EXPECT_EQ(halfway.steps, 2u);

  TestJob other({1, 1});
  for (uint32_t node = 0; node < 2; ++node) {
    BucketAnnouncement bucket{kBucket, kLayout};
    bucket.update = AdamW();
    ASSERT_TRUE(other.job().RegisterBucket(node, bucket).ok());
    ASSERT_TRUE(other.job().SetSettings(node, 1, Settings(0.1)).ok());
  }
  ASSERT_TRUE(Write(other, halfway).ok());
  for (uint32_t node = 0; node < 2; ++node) {
    ASSERT_TRUE(Contribute(node, 3, Values(2), 1).ok());
    Contribution again{
        {kBucket, 0, 1}, 1, WireFormat::kFloat32, kElems, Split(EncodedFloats(Values(2)), {})};
    again.settings = 1;
    ASSERT_TRUE(other.job().Contribute(node, std::move(again), Now()).ok());
  }
  EXPECT_EQ(DecodedFloats(other.sink(0).results.back().payload),
            DecodedFloats(test_.sink(0).results.back().payload));
}

TEST_F(JobUpdatesTest, NodesThatDifferAreNamedAndTheJobFails) {
  BucketAnnouncement bucket{kBucket, kLayout};
  bucket.update = AdamW();
  ASSERT_TRUE(test_.job().RegisterBucket(0, bucket).ok());
  bucket.update->decoupled = false;
  EXPECT_THAT(std::string(test_.job().RegisterBucket(1, bucket).message()),
              HasSubstr("announced bucket 3 with update 'adam, weights in fp32, 2 groups', "));

  TestJob other({1, 1});
  ASSERT_TRUE(other.job().SetSettings(0, 1, Settings(0.1)).ok());
  EXPECT_THAT(std::string(other.job().SetSettings(1, 1, Settings(0.2)).message()),
              HasSubstr("gives settings 1 with lr 0.2 of group 0, node 0"));
  EXPECT_EQ(other.sink(0).failures.size(), 1u);
}

TEST_F(JobUpdatesTest, UpdateThatCommitsGivesSquaresAndChangesWeightsOnlyWhenItIsPulled) {
  UpdateRule rule = AdamW();
  rule.commits = true;
  Register(rule);
  Weights expected{.params = Values(1)};
  ASSERT_TRUE(Write(test_, expected).ok());
  for (uint64_t step = 1; step <= 3; ++step) {
    const uint64_t push = 2 * step - 1;
    const auto value = static_cast<float>(step);
    // The mean of both nodes.
    const Floats mean = Values(value);
    ASSERT_TRUE(Contribute(0, push, Values(value - 0.5f), 0).ok());
    ASSERT_TRUE(Contribute(1, push, Values(value + 0.5f), 0).ok());
    const RoundResult squares = test_.sink(0).results.back();
    ASSERT_EQ(squares.wire, WireFormat::kFloat64);
    ASSERT_EQ(squares.elems, 2U);  // a granule for each tensor
    double sums[2] = {};
    const Bytes bytes = BytesOf(squares.payload);
    std::memcpy(sums, bytes.data(), sizeof(sums));
    double total[2] = {};
    for (uint64_t i = 0; i < kElems; ++i) total[i < 500 ? 0 : 1] += double{mean[i]} * mean[i];
    // All terms are multiples of 2^-4 far below 2^53, so that no order of sums rounds.
    EXPECT_EQ(sums[0], total[0]);
    EXPECT_EQ(sums[1], total[1]);
    EXPECT_EQ(Read(test_), expected);

    SetSettings(step, 0.1);
    ASSERT_TRUE(Pull(0, push + 1, step).ok());
    ASSERT_TRUE(Pull(1, push + 1, step).ok());
    StepLocally(expected, mean, 0.1);
    EXPECT_EQ(DecodedFloats(test_.sink(1).results.back().payload), expected.params);
    EXPECT_EQ(Read(test_), expected);
  }
  // What has been pulled is gone.
  SetSettings(4, 0.1);
  ASSERT_TRUE(Pull(0, 7, 4).ok());
  EXPECT_THAT(std::string(Pull(1, 7, 4).message()), HasSubstr("nothing has been pushed"));
}

TEST_F(JobUpdatesTest, TimeOfUpdatesIsCountedApartFromThatOfFolds) {
  Register();
  ASSERT_TRUE(Write(test_, {.params = Values(1)}).ok());
  SetSettings(1, 0.1);
  for (uint32_t node : {0U, 1U}) ASSERT_TRUE(Contribute(node, 1, Values(1), 1).ok());
  const auto seconds = [this](const char* phase) {
    return test_.registry()
        .GetHistogram("thalweg_shard_phase_seconds", "", {{"phase", phase}})
        .Sum();
  };
  EXPECT_GT(seconds("update"), 0);
  EXPECT_GT(seconds("fold"), 0);
  // Reports count whole nanoseconds.
  EXPECT_NEAR(ToSeconds(test_.job().Report(Now()).update_time), seconds("update"), 2e-9);
}

TEST_F(JobUpdatesTest, PullOfAnUpdateThatDoesNotCommitIsRefused) {
  Register();
  SetSettings(1, 0.1);
  EXPECT_THAT(std::string(Pull(0, 1, 1).message()),
              HasSubstr("but the contribution names settings 1 and pulls"));
}

TEST_F(JobUpdatesTest, RoundWithoutWeightsOrSettingsFailsWithTheReason) {
  Register();
  ASSERT_TRUE(Write(test_, {.params = Values(1)}).ok());
  ASSERT_TRUE(Contribute(0, 1, Values(1), 7).ok());
  EXPECT_THAT(std::string(Contribute(1, 1, Values(1), 7).message()),
              HasSubstr("bucket 3 round 1 chunk 0 names settings 7, which are not known"));

  TestJob other({1});
  BucketAnnouncement bucket{kBucket, kLayout};
  bucket.update = AdamW();
  ASSERT_TRUE(other.job().RegisterBucket(0, bucket).ok());
  ASSERT_TRUE(other.job().SetSettings(0, 1, Settings(0.1)).ok());
  Contribution first{
      {kBucket, 0, 1}, 1, WireFormat::kFloat32, kElems, Split(EncodedFloats(Values(1)), {})};
  first.settings = 1;
  EXPECT_THAT(std::string(other.job().Contribute(0, std::move(first), Now()).message()),
              HasSubstr("the shard has no weights to update"));
}

TEST_F(JobUpdatesTest, ContributionThatNamesNoSettingsIsRefused) {
  Register();
  EXPECT_THAT(std::string(Contribute(0, 1, Values(1), 0).message()),
              HasSubstr("is updated, but the contribution names no settings"));
}

TEST_F(JobUpdatesTest, WeightsOfAnotherSizeAreRefusedAndNothingChanges) {
  Register();
  ASSERT_TRUE(Write(test_, {.params = Values(1)}).ok());
  const auto why = [&](uint32_t chunk, uint32_t slice, size_t elems) {
    return std::string(
        test_.job().WriteWeights(0, kBucket, chunk, slice, {Floats(elems), 1}).message());
  };
  EXPECT_THAT(why(0, 0, 7),
              HasSubstr("weights of chunk 0 of bucket 3: expected 600 values in slice 0, got 7"));
  EXPECT_THAT(why(0, 2, 3), HasSubstr("expected 600 values or none in slice 2, got 3"));
  EXPECT_THAT(why(0, 3, 600), HasSubstr("expected a slice up to 2, got 3"));
  EXPECT_THAT(why(9, 0, 600), HasSubstr("has 1 chunks, got chunk 9"));
  EXPECT_EQ(Read(test_), (Weights{.params = Values(1)}));
}

TEST_F(JobUpdatesTest, MemoryOfWeightsAndMomentsIsReservedBeforehand) {
  // Windows take 64 chunks of 4 KiB for a node and its results, and layouts their share.
  TestJob small({1}, 2 * 64 * kMinChunkBytes + (1 << 20));
  BucketAnnouncement bucket{kBucket, {DType::kFloat32, {{"w", {1 << 20}}}}};
  bucket.update = AdamW();
  bucket.update->groups = {0};
  EXPECT_THAT(std::string(small.job().RegisterBucket(0, bucket).message()),
              HasSubstr("12582912 for residuals and weights"));
}

TEST(JobUpdatesResumedTest, NodeThatReadsWeightsOfARestartedShardHearsThatTheyAreLost) {
  TestJob job({1}, TestJob::kPlenty, {{{kBucket, {4}}}});
  BucketAnnouncement bucket{kBucket, kLayout};
  bucket.update = AdamW();
  ASSERT_TRUE(job.job().RegisterBucket(0, bucket).ok());
  const absl::Status lost = job.job().ReadWeights(0, kBucket, 0, 0).status();
  EXPECT_TRUE(absl::IsDataLoss(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("has lost the weights that it kept"));
}

}  // namespace
}  // namespace thalweg::job_updates_test
