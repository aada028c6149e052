// These tests take buckets whose weights shards keep through workers, sidecars and shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/integration/cluster.h"

namespace thalweg::served_weights_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

using Values = std::vector<float>;

constexpr uint64_t kElems = 5000;  // several chunks of 1024
constexpr BucketId kBucket{0, 0};
const BucketLayout kLayout{DType::kFloat32, {{"a", {7}}, {"b", {4993}}}};
const UpdateRule kSgd{.optimizer = Optimizer::kSgd, .groups = {0, 0}};
const UpdateStep kStep{{{.lr = 0.25, .momentum = 0.5}}};

// All numbers below are multiples of a power of two, so that float32 has them exactly.
float FirstWeight(uint64_t i) { return static_cast<float>(i % 64) * 0.5F; }
float MeanGradient(uint64_t i, uint64_t round) { return static_cast<float>((i + round) % 8); }

Values GradientOf(uint32_t rank, uint32_t world_size, uint64_t round) {
  Values values(kElems);
  for (uint64_t i = 0; i < kElems; ++i) {
    // The shares of all ranks sum to world_size times the mean.
    const auto off = static_cast<float>(rank) - static_cast<float>(world_size - 1) / 2;
    values[i] = MeanGradient(i, round) + off;
  }
  return values;
}

// What torch.optim.SGD(lr=0.25, momentum=0.5) does.
struct Reference {
  Values weights = Values(kElems);
  Values momentum = Values(kElems);

  Reference() {
    for (uint64_t i = 0; i < kElems; ++i) weights[i] = FirstWeight(i);
  }
  void Step(uint64_t round) {
    for (uint64_t i = 0; i < kElems; ++i) {
      momentum[i] = (round == 1 ? 0 : 0.5F * momentum[i]) + MeanGradient(i, round);
      weights[i] -= 0.25F * momentum[i];
    }
  }
};

std::future<Outcome> Push(Session& session, const Values& gradient, uint64_t settings) {
  auto promise = std::make_shared<std::promise<Outcome>>();
  session.Submit(
      kBucket, std::as_bytes(std::span(gradient)), {.settings = settings},
      [promise](absl::StatusOr<ReducedBucket> weights) {
        if (!weights.ok()) return promise->set_value(weights.status());
        promise->set_value(std::vector<std::byte>(weights->bytes.begin(), weights->bytes.end()));
      });
  return promise->get_future();
}

std::future<Outcome> Pull(Session& session, uint64_t settings) {
  auto promise = std::make_shared<std::promise<Outcome>>();
  session.Pull(kBucket, settings, [promise](absl::StatusOr<ReducedBucket> weights) {
    if (!weights.ok()) return promise->set_value(weights.status());
    promise->set_value(std::vector<std::byte>(weights->bytes.begin(), weights->bytes.end()));
  });
  return promise->get_future();
}

Values ValuesOf(const std::vector<std::byte>& bytes) {
  Values values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The workers of a job, each in a thread of its own.
class Workers {
 public:
  explicit Workers(Cluster& cluster, const std::string& codec = "fp32", bool hosted = false)
      : sessions_(cluster.ConnectAll([&](SessionOptions& o) {
          o.codec = *CodecPolicy::Parse(codec);
          if (hosted) o.shards = cluster.HostedPlaces();
        })) {}

  uint32_t size() const { return static_cast<uint32_t>(sessions_.size()); }
  Session& session(uint32_t rank) { return **sessions_[rank]; }

  void Run(const std::function<void(uint32_t rank, Session& session)>& work) {
    std::vector<std::future<void>> running;
    for (uint32_t rank = 0; rank < size(); ++rank) {
      ASSERT_TRUE(sessions_[rank].ok()) << sessions_[rank].status();
      running.push_back(
          std::async(std::launch::async, [&, rank] { work(rank, *sessions_[rank].value()); }));
    }
    for (auto& worker : running) Get(worker);
  }
  // Announces the bucket everywhere; the first worker writes the weights.
  void Begin(const UpdateRule& rule) {
    Run([&](uint32_t, Session& session) {
      ASSERT_TRUE(session.RegisterServedBucket(kBucket, kLayout, rule).ok());
    });
    const absl::Status written =
        session(0).WriteWeights(kBucket, 0, Reference().weights, /*steps=*/0);
    ASSERT_TRUE(written.ok()) << written;
  }

 private:
  std::vector<absl::StatusOr<std::unique_ptr<Session>>> sessions_;
};

struct Shape {
  uint32_t nodes, workers, shards;
  bool hosted = false;
};

class ServedWeightsTest : public ::testing::TestWithParam<Shape> {};

TEST_P(ServedWeightsTest, EveryWorkerGetsTheWeightsThatOneOptimizerWouldHave) {
  const Shape shape = GetParam();
  Cluster cluster(shape.nodes, shape.workers, shape.shards);
  Workers workers(cluster, "fp32", shape.hosted);
  workers.Begin(kSgd);
  constexpr uint64_t kRounds = 5;
  workers.Run([&](uint32_t rank, Session& session) {
    Reference reference;
    ASSERT_TRUE(session.SetSettings(1, kStep).ok());
    for (uint64_t round = 1; round <= kRounds; ++round) {
      const Values gradient = GradientOf(rank, workers.size(), round);
      auto pushed = Push(session, gradient, 1);
      const Outcome weights = Get(pushed);
      ASSERT_TRUE(weights.ok()) << weights.status();
      reference.Step(round);
      ASSERT_EQ(ValuesOf(*weights), reference.weights) << "rank " << rank << ", round " << round;
    }
  });
  Reference reference;
  for (uint64_t round = 1; round <= kRounds; ++round) reference.Step(round);
  for (uint32_t rank = 0; rank < workers.size(); ++rank) {
    const auto moment = workers.session(rank).ReadWeights(kBucket, 1);
    ASSERT_TRUE(moment.ok()) << moment.status();
    EXPECT_EQ(moment->values, reference.momentum);
    EXPECT_EQ(moment->steps, kRounds);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ServedWeightsTest,
                         ::testing::Values(Shape{1, 1, 1}, Shape{1, 2, 2}, Shape{2, 2, 1},
                                           Shape{3, 1, 2}, Shape{2, 2, 3, true}),
                         [](const auto& info) {
                           const Shape& s = info.param;
                           return absl::StrCat(s.nodes, "x", s.workers, "on", s.shards,
                                               s.hosted ? "hosted" : "");
                         });

TEST_P(ServedWeightsTest, UpdateInTwoRoundsGivesTheSquaresFirstAndThenTheSameWeights) {
  const Shape shape = GetParam();
  Cluster cluster(shape.nodes, shape.workers, shape.shards);
  Workers workers(cluster, "fp32", shape.hosted);
  UpdateRule rule = kSgd;
  rule.commits = true;
  workers.Begin(rule);
  workers.Run([&](uint32_t rank, Session& session) {
    Reference reference;
    for (uint64_t round = 1; round <= 5; ++round) {
      std::promise<absl::StatusOr<std::vector<double>>> looked;
      const Values gradient = GradientOf(rank, workers.size(), round);
      session.Submit(kBucket, std::as_bytes(std::span(gradient)), {},
                     [&](absl::StatusOr<ReducedBucket> reduced) {
                       if (!reduced.ok()) return looked.set_value(reduced.status());
                       looked.set_value(reduced->squares);
                     });
      auto future = looked.get_future();
      const auto squares = Get(future);
      ASSERT_TRUE(squares.ok()) << squares.status();
      // The first tensor is one granule, the second one and a rest; exact, as all terms are
      // integers.
      Values expected(3);
      for (uint64_t i = 0; i < kElems; ++i) {
        const float mean = MeanGradient(i, round);
        expected[i < 7 ? 0 : i < 7 + 4096 ? 1 : 2] += mean * mean;
      }
      EXPECT_EQ(Values(squares->begin(), squares->end()), expected);

      if (round == 3) continue;  // a step that is skipped
      ASSERT_TRUE(session.SetSettings(round, kStep).ok());
      auto pulled = Pull(session, round);
      const Outcome weights = Get(pulled);
      ASSERT_TRUE(weights.ok()) << weights.status();
      reference.Step(round);
      ASSERT_EQ(ValuesOf(*weights), reference.weights) << "rank " << rank << ", round " << round;
    }
  });
}

using Squares = absl::StatusOr<std::vector<double>>;

Session::Done SquaresTo(const std::shared_ptr<std::promise<Squares>>& promise) {
  return [promise](absl::StatusOr<ReducedBucket> reduced) {
    if (!reduced.ok()) return promise->set_value(reduced.status());
    promise->set_value(reduced->squares);
  };
}

// The squares of elements in the three granules of kLayout: the first tensor is one, the second one
// and a rest.
std::vector<double> SquaresByGranule(const Values& values) {
  std::vector<double> squares(3);
  for (uint64_t i = 0; i < kElems; ++i) {
    squares[i < 7 ? 0 : i < 7 + kUpdateGranule ? 1 : 2] += double{values[i]} * values[i];
  }
  return squares;
}

TEST_P(ServedWeightsTest, LambMeasuresWeightsAndUpdateBeforeItStepsByTheRatioOfEachTensor) {
  const Shape shape = GetParam();
  Cluster cluster(shape.nodes, shape.workers, shape.shards);
  Workers workers(cluster, "fp32", shape.hosted);
  workers.Begin(
      {.optimizer = Optimizer::kLamb, .decoupled = true, .commits = true, .groups = {0, 1}});
  workers.Run([&](uint32_t rank, Session& session) {
    Values expected = Reference().weights;
    for (uint64_t step = 1; step <= 3; ++step) {
      const auto looked = std::make_shared<std::promise<Squares>>();
      // A mean of 4: without betas and eps, the update of every element is 1.
      const float off = static_cast<float>(rank) - static_cast<float>(workers.size() - 1) / 2;
      const Values gradient(kElems, 4 + off);
      session.Submit(kBucket, std::as_bytes(std::span(gradient)), {}, SquaresTo(looked));
      auto squares = looked->get_future();
      EXPECT_EQ(Get(squares).value(), SquaresByGranule(Values(kElems, 4)));

      UpdateStep settings{{GroupStep{.lr = 0.25}, GroupStep{.lr = 0.25}}};
      settings.measures = true;
      ASSERT_TRUE(session.SetSettings(2 * step - 1, settings).ok());
      const auto measured = std::make_shared<std::promise<Squares>>();
      session.Measure(kBucket, 2 * step - 1, SquaresTo(measured));
      std::vector<double> both = SquaresByGranule(expected);
      for (const double one : SquaresByGranule(Values(kElems, 1))) both.push_back(one);
      auto norms = measured->get_future();
      EXPECT_EQ(Get(norms).value(), both) << "rank " << rank << ", step " << step;

      settings.measures = false;
      settings.groups[0].trust_ratio = 2;
      settings.groups[1].trust_ratio = 4;
      ASSERT_TRUE(session.SetSettings(2 * step, settings).ok());
      for (uint64_t i = 0; i < kElems; ++i) expected[i] -= i < 7 ? 0.5F : 1.0F;
      auto pulled = Pull(session, 2 * step);
      const Outcome weights = Get(pulled);
      ASSERT_TRUE(weights.ok()) << weights.status();
      ASSERT_EQ(ValuesOf(*weights), expected) << "rank " << rank << ", step " << step;
    }
  });
}

TEST(ServedWeightsTest, WeightsCrossTheNetworkRoundedAndStayWholeOnTheShards) {
  Cluster cluster(2, 1, 2);
  Workers workers(cluster);
  UpdateRule rule = kSgd;
  rule.down = WireFormat::kBFloat16;
  workers.Begin(rule);
  // 1 + 2^-10 is not a bfloat16: the nearest is 1.
  const UpdateStep step{{{.lr = 1}}};
  ASSERT_TRUE(
      workers.session(0).WriteWeights(kBucket, 0, Values(kElems, 1 + 0x1p-10F), /*steps=*/3).ok());
  workers.Run([&](uint32_t, Session& session) {
    ASSERT_TRUE(session.SetSettings(1, step).ok());
    auto pushed = Push(session, Values(kElems, 0), 1);
    const Outcome weights = Get(pushed);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_THAT(ValuesOf(*weights), Each(1.0F));
  });
  const auto kept = workers.session(1).ReadWeights(kBucket, 0);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_THAT(kept->values, Each(1 + 0x1p-10F));
  EXPECT_EQ(kept->steps, 4U);
}

TEST(ServedWeightsTest, WeightsThatComeAsDifferencesAreExactWhereTheseAre) {
  for (const bool commits : {false, true}) {
    Cluster cluster(2, 2, 2);
    Workers workers(cluster);
    UpdateRule rule = kSgd;
    rule.commits = commits;
    rule.down = WireFormat::kInt8;
    workers.Begin(rule);
    for (uint64_t round = 1; round <= 5; ++round) {
      // Half-way somebody writes the weights anew.
      if (round == 4) {
        ASSERT_TRUE(workers.session(1).WriteWeights(kBucket, 0, Values(kElems, 3), 3).ok());
      }
      workers.Run([&](uint32_t, Session& session) {
        ASSERT_TRUE(session.SetSettings(1, {{{.lr = 0.5}}}).ok());
        auto pushed = Push(session, Values(kElems, 1), commits ? 0 : 1);
        Outcome weights = Get(pushed);
        ASSERT_TRUE(weights.ok()) << weights.status();
        if (commits) {
          auto pulled = Pull(session, 1);
          weights = Get(pulled);
          ASSERT_TRUE(weights.ok()) << weights.status();
        }
        const Values got = ValuesOf(*weights);
        for (uint64_t i = 0; i < kElems; ++i) {
          const float first = round < 4 ? FirstWeight(i) : 3;
          const auto steps = static_cast<float>(round < 4 ? round : round - 3);
          // 125 times the scale of a block, 0.5 / 125, may be rounded.
          ASSERT_NEAR(got[i], first - 0.5F * steps, 1e-6F) << "round " << round << ", " << i;
        }
      });
    }
    EXPECT_LT(workers.session(0).stats().wire_bytes_received,
              5 * kElems * sizeof(float) * (commits ? 3 : 2) / 2);
  }
}

TEST(ServedWeightsTest, MomentThatIsZerosAndWeightsThatNobodyWroteAreReadAsNone) {
  Cluster cluster(1, 1, 1);
  Workers workers(cluster);
  Session& session = workers.session(0);
  ASSERT_TRUE(session.RegisterServedBucket(kBucket, kLayout, kSgd).ok());
  for (const uint32_t slice : {0U, 1U}) {
    const auto none = session.ReadWeights(kBucket, slice);
    ASSERT_TRUE(none.ok()) << none.status();
    EXPECT_TRUE(none->values.empty());
  }
}

// Returns what every worker is told when the job fails.
std::vector<std::string> FailuresOf(Workers& workers, const UpdateRule& rule, uint64_t settings,
                                    const std::function<UpdateStep(uint32_t rank)>& step_of,
                                    const BucketLayout& layout = kLayout) {
  std::vector<std::string> failures(workers.size());
  workers.Run([&](uint32_t rank, Session& session) {
    session.RegisterServedBucket(kBucket, layout, rule).IgnoreError();
    session.SetSettings(1, step_of(rank)).IgnoreError();
    auto pushed = Push(session, GradientOf(rank, workers.size(), 1), settings);
    failures[rank] = std::string(Get(pushed).status().message());
  });
  return failures;
}

TEST(ServedWeightsTest, SettingsThatDifferBetweenWorkersFailTheJobAndNameThem) {
  Cluster nodes(2, 1, 2);
  Cluster node(1, 2, 1);
  for (Cluster* cluster : {&nodes, &node}) {
    Workers workers(*cluster);
    const auto failures = FailuresOf(
        workers, kSgd, 1, [](uint32_t rank) { return UpdateStep{{{.lr = 0.5 + rank}}}; });
    EXPECT_THAT(failures, Each(AllOf(HasSubstr("lr"), HasSubstr("0.5"), HasSubstr("1.5"))));
  }
}

TEST(ServedWeightsTest, RulesThatDifferBetweenWorkersFailTheJob) {
  Cluster cluster(1, 2, 1);
  Workers workers(cluster);
  std::vector<std::string> failures(2);
  workers.Run([&](uint32_t rank, Session& session) {
    UpdateRule rule = kSgd;
    if (rank == 1) rule.optimizer = Optimizer::kAdam;
    session.RegisterServedBucket(kBucket, kLayout, rule).IgnoreError();
    session.SetSettings(1, kStep).IgnoreError();
    auto pushed = Push(session, GradientOf(rank, 2, 1), 1);
    failures[rank] = std::string(Get(pushed).status().message());
  });
  EXPECT_THAT(failures, Each(AllOf(HasSubstr("sgd"), HasSubstr("adam"))));
}

TEST(ServedWeightsTest, RoundBeforeAnyoneHasWrittenTheWeightsFailsTheJob) {
  Cluster cluster(2, 1, 1);
  Workers workers(cluster);
  EXPECT_THAT(FailuresOf(workers, kSgd, 1, [](uint32_t) { return kStep; }),
              Each(HasSubstr("the shard has no weights to update: nobody has written them")));
}

// A gradient that int8 has without a rounding: the largest of each block is 125, and all are whole.
float WholeGradient(uint64_t i, uint64_t round) {
  return i % 256 == 0 ? 125 : static_cast<float>((i + round) % 8);
}

class CodedGradientsTest : public ::testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(CodedGradientsTest, ShardsUpdateWeightsByTheMeanOfWhatNodesHaveEncoded) {
  const auto [codec, commits] = GetParam();
  Cluster cluster(2, 2, 2);
  Workers workers(cluster, codec);
  UpdateRule rule = kSgd;
  rule.commits = commits;
  rule.groups = {0};
  const BucketLayout one{DType::kFloat32, {{"b", {kElems}}}};
  workers.Run([&](uint32_t, Session& session) {
    ASSERT_TRUE(session.RegisterServedBucket(kBucket, one, rule).ok());
  });
  ASSERT_TRUE(workers.session(0).WriteWeights(kBucket, 0, Values(kElems, 1), /*steps=*/0).ok());
  const UpdateStep step{{{.lr = 0.25}}};
  workers.Run([&](uint32_t, Session& session) {
    Values expected(kElems, 1);
    ASSERT_TRUE(session.SetSettings(1, step).ok());
    for (uint64_t round = 1; round <= 3; ++round) {
      Values gradient(kElems);
      for (uint64_t i = 0; i < kElems; ++i) gradient[i] = WholeGradient(i, round);
      auto pushed = Push(session, gradient, rule.commits ? 0 : 1);
      Outcome weights = Get(pushed);
      ASSERT_TRUE(weights.ok()) << weights.status();
      if (rule.commits) {
        auto pulled = Pull(session, 1);
        weights = Get(pulled);
        ASSERT_TRUE(weights.ok()) << weights.status();
      }
      for (uint64_t i = 0; i < kElems; ++i) expected[i] -= 0.25F * gradient[i];
      ASSERT_EQ(ValuesOf(*weights), expected) << "round " << round;
    }
  });
  const auto kept = workers.session(1).ReadWeights(kBucket, 0);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->steps, 3U);
  EXPECT_LT(workers.session(0).stats().wire_bytes_sent, 3 * kElems * 2 * sizeof(float));
}

INSTANTIATE_TEST_SUITE_P(Codecs, CodedGradientsTest,
                         ::testing::Combine(::testing::Values("int8:start=0",
                                                              "topk:ratio=1,start=0"),
                                            ::testing::Bool()));

TEST(ServedWeightsTest, RoundWithoutSettingsAndCodecsThatLoseAreRefused) {
  Cluster cluster(2, 1, 1);
  Workers plain(cluster);
  EXPECT_THAT(FailuresOf(plain, kSgd, 0, [](uint32_t) { return kStep; }),
              Each(HasSubstr("without settings")));
  Cluster other(2, 1, 1);
  Workers lossy(other, "int8");
  EXPECT_THAT(FailuresOf(lossy, kSgd, 1, [](uint32_t) { return kStep; }),
              Each(AllOf(HasSubstr("int8"), HasSubstr("start=0"))));
  Cluster third(2, 1, 1);
  Workers padded(third, "int8:start=0");
  EXPECT_THAT(FailuresOf(padded, kSgd, 1, [](uint32_t) { return kStep; }),
              Each(AllOf(HasSubstr("int8"), HasSubstr("padding"))));
  Cluster fourth(2, 1, 1);
  Workers factors(fourth, "powersgd:start=0");
  const BucketLayout matrices{DType::kFloat32, {{"a", {50, 50}}, {"b", {50, 50}}}};
  EXPECT_THAT(FailuresOf(
                  factors, kSgd, 1, [](uint32_t) { return kStep; }, matrices),
              Each(AllOf(HasSubstr("powersgd"), HasSubstr("weights on shards"))));
}

}  // namespace
}  // namespace thalweg::served_weights_test
