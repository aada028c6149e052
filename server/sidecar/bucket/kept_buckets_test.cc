#include "server/sidecar/bucket/kept_buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "core/base/testing/test_patience.h"
#include "kernels/codec/dense.h"
#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::kept_buckets_test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kElems = 10;
constexpr BucketId kId{3, 0};

// Two workers bring a bucket that crosses the network in fp16.
class KeptBucketsTest : public BucketsFixture {
 protected:
  KeptBucketsTest() : BucketsFixture(HelloOf(0, 2, "fp16")) {}

  void SetUp() override {
    BucketsFixture::SetUp();
    for (uint32_t rank : {0u, 1u}) kept_.Expect(rank, 1);
  }

  // What worker `rank` knows: its last result has elements of this value.
  struct Knowledge {
    uint64_t round = 0;
    float value = 0;
    bool is_placed = true;
  };
  void Bring(uint32_t rank, const Knowledge& known) {
    ipc::KeptBucket bucket{kId, {DType::kFloat32, {{"w", {kElems}}}}, known.round, 5, {}, {}};
    if (known.is_placed) bucket.shards = {0}, bucket.loads = {20};
    arenas_.push_back(*BucketArena::Create("input", kElems * sizeof(float), true));
    ASSERT_TRUE(kept_.Add(rank, bucket, Duplicate(arenas_.back())).ok());
    if (known.round == 0) return;
    arenas_.push_back(*BucketArena::Create("result", kElems * sizeof(float), true));
    const std::vector<float> values(kElems, known.value);
    std::memcpy(arenas_.back().payload(), values.data(), kElems * sizeof(float));
    ASSERT_TRUE(kept_.AddResult(rank, {kId}, Duplicate(arenas_.back())).ok());
  }
  static UniqueFd Duplicate(const BucketArena& arena) { return UniqueFd(dup(arena.fd())); }
  absl::StatusOr<KeptBuckets::Restored> Restore() {
    if (const absl::Status all = kept_.Await(Now() + kTestPatience); !all.ok()) return all;
    return kept_.Restore(table_, 4, [](uint32_t rank) { return std::to_string(rank); });
  }

  JobOutcome outcome_{"job"};
  KeptBuckets kept_{2, outcome_};
  std::vector<BucketArena> arenas_;
};

TEST_F(KeptBucketsTest, ResultIsReturnedAsShardsHadSentIt) {
  const float third = 0.333251953125F;  // a number of fp16
  for (uint32_t rank : {0u, 1u}) Bring(rank, {7, third});
  const auto restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored.status();
  ASSERT_EQ(restored->buckets.size(), 1u);
  const KeptPlaces::Bucket& bucket = restored->buckets[0];
  EXPECT_EQ(bucket.announcement.id, kId);
  EXPECT_EQ(bucket.announcement.wire, WireFormat::kFloat16);
  EXPECT_EQ(bucket.placed, (Placement::Placed{{0}, {20}}));
  ASSERT_EQ(bucket.results.size(), 1u);
  const RoundResult& result = bucket.results[0];
  EXPECT_EQ(result.id, (RoundId{kId, 0, 7}));
  EXPECT_EQ(result.workers, 4u);
  EXPECT_EQ(result.nonfinite_elems, 0u);
  std::vector<float> decoded(kElems);
  ASSERT_TRUE(
      DecodePayload(result.payload, DType::kFloat16, DType::kFloat32, kElems, decoded.data()).ok());
  EXPECT_EQ(decoded, std::vector<float>(kElems, third));
}

TEST_F(KeptBucketsTest, BucketGoesOnAfterItsLastRound) {
  for (uint32_t rank : {0u, 1u}) Bring(rank, {7, 1});
  const auto restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored.status();
  const auto bucket = table_.Find(kId.index);
  ASSERT_NE(bucket, nullptr);
  EXPECT_EQ(bucket->whole().part().shard_of_chunk, std::vector<uint32_t>{0});
  EXPECT_FALSE(bucket->Submit(0, {kId, 7}, Now()).ok());
  for (uint32_t rank : {0u, 1u}) EXPECT_TRUE(bucket->Submit(rank, {kId, 8}, Now()).ok());
  const BucketArena& result = bucket->memory().result();
  EXPECT_EQ(result.WaitReady(1, Now()), 1u);
  float first = 0;
  std::memcpy(&first, result.payload(), sizeof first);
  EXPECT_EQ(first, 1);
  ASSERT_EQ(restored->answers.size(), 2u);
  for (const auto& answer : restored->answers) EXPECT_FALSE(answer.missed.has_value());
}

TEST_F(KeptBucketsTest, WorkerThatHasNotHeardOfTheLastRoundIsTold) {
  Bring(0, {6, 1});
  Bring(1, {7, 2});
  const auto restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored.status();
  ASSERT_EQ(restored->answers.size(), 2u);
  const auto& missed = restored->answers[0].missed;
  ASSERT_TRUE(missed.has_value());
  EXPECT_EQ(missed->id, kId);
  EXPECT_EQ(missed->round, 7u);
  EXPECT_EQ(missed->workers, 4u);
  EXPECT_EQ(missed->nonfinite_elems, 5u);
  EXPECT_FALSE(restored->answers[1].missed.has_value());
  float first = 0;
  std::memcpy(&first, table_.Find(kId.index)->memory().result().payload(), sizeof first);
  EXPECT_EQ(first, 2);
}

TEST_F(KeptBucketsTest, NonFiniteElementsOfAResultAreCountedAgain) {
  for (uint32_t rank : {0u, 1u}) Bring(rank, {7, INFINITY});
  const auto restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->buckets[0].results[0].nonfinite_elems, kElems);
}

TEST_F(KeptBucketsTest, PlacementThatOneWorkerHasHeardOfCountsInTheFirstRound) {
  Bring(0, {0, 0, false});
  Bring(1, {0, 0, true});
  const auto restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored.status();
  ASSERT_EQ(restored->buckets.size(), 1u);
  EXPECT_EQ(restored->buckets[0].results.size(), 0u);
  EXPECT_EQ(table_.Find(kId.index)->whole().part().shard_of_chunk, std::vector<uint32_t>{0});
}

TEST_F(KeptBucketsTest, BucketThatShardsDoNotKnowYetIsNotTakenUp) {
  for (uint32_t rank : {0u, 1u}) Bring(rank, {0, 0, false});
  const auto restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->buckets.size(), 0u);
  EXPECT_EQ(restored->answers.size(), 2u);
}

// The same with a codec that carries something from round to round, of which worker 0 holds the
// memory.
class KeptCodecsTest : public KeptBucketsTest {
 protected:
  void SetUp() override {
    hello_.codec = CodecPolicy::Parse("int8:start=1").value();
    BucketTerms terms = TermsOf(hello_, device_);
    terms.keeps_codecs = true;
    table_.Open(terms);
    BucketTable dead(dead_states_, compression_, shards_);
    dead.Open(terms);
    died_ = Announce(dead, kId.index, kElems, 2).bucket;
    for (uint32_t rank : {0u, 1u}) kept_.Expect(rank, 1);
  }
  // Rounds that nobody but this node takes part in.
  void TakeRound() {
    const uint64_t round = died_->round().number() + 1;
    for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(died_->Submit(rank, {kId, round}, Now()).ok());
    died_->BeginRound(kUnknownLossScale);
    for (BucketCodec* const codec : died_->round().codecs()) {
      for (uint32_t number = 0; number < kMaxParts; ++number) {
        Part* const part = codec->FindPart(number);
        if (part == nullptr) continue;
        part->BeginRound();
        died_->codec_memory()->KeepPlace(*part, std::vector<uint32_t>{0},
                                         std::vector<uint64_t>{20});
      }
    }
    died_->FinishRound(Now());
  }
  void BringAll(uint64_t round) {
    for (uint32_t rank : {0u, 1u}) {
      ipc::KeptBucket bucket{kId,      {DType::kFloat32, {{"w3", {kElems}}}}, round, 0, {0}, {20},
                             rank == 0};
      arenas_.push_back(*BucketArena::Create("input", kElems * sizeof(float), true));
      ASSERT_TRUE(kept_.Add(rank, bucket, Duplicate(arenas_.back())).ok());
      arenas_.push_back(*BucketArena::Create("result", kElems * sizeof(float), true));
      ASSERT_TRUE(kept_.AddResult(rank, {kId}, Duplicate(arenas_.back())).ok());
    }
  }
  absl::Status AddMemory(uint32_t rank = 0) {
    const BucketArena& arena = died_->codec_memory()->arena();
    return kept_.AddCodecMemory(rank, {kId, arena.payload_bytes()}, Duplicate(arena));
  }

  CodecStates dead_states_;
  std::shared_ptr<NodeBucket> died_;
};

TEST_F(KeptCodecsTest, PartsAreTakenUpWithTheirOwnCounts) {
  for (int round = 0; round < 3; ++round) TakeRound();
  BringAll(3);
  ASSERT_TRUE(AddMemory().ok());
  const auto restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored.status();
  std::map<uint32_t, uint64_t> rounds;
  for (const KeptPlaces::Bucket& bucket : restored->buckets) {
    EXPECT_EQ(bucket.placed, (Placement::Placed{{0}, {20}}));
    ASSERT_EQ(bucket.results.size(), 1u);
    rounds[bucket.announcement.id.part] = bucket.results[0].id.round;
  }
  EXPECT_EQ(rounds, (std::map<uint32_t, uint64_t>{{0, 1}, {1, 2}}));
  EXPECT_EQ(table_.Find(kId.index)->compressing()[0]->rounds(), 3u);
}

TEST_F(KeptCodecsTest, MemoryIsAwaited) {
  TakeRound();
  BringAll(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(kept_.Await(Now())));
  ASSERT_TRUE(AddMemory().ok());
  EXPECT_TRUE(kept_.Await(Now()).ok());
}

TEST_F(KeptCodecsTest, MemoryThatNobodyAnnouncedOrOfAnotherRoundIsRefused) {
  TakeRound();
  BringAll(2);
  EXPECT_TRUE(absl::IsInvalidArgument(AddMemory(1)));
  ASSERT_TRUE(AddMemory().ok());
  EXPECT_TRUE(absl::IsInvalidArgument(AddMemory()));
  EXPECT_TRUE(absl::IsDataLoss(Restore().status()));
}

TEST_F(KeptBucketsTest, ResultsThatAreTwoRoundsApartAreRefused) {
  Bring(0, {5, 1});
  Bring(1, {7, 2});
  const absl::Status refused = Restore().status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("more than a round apart"));
}

TEST_F(KeptBucketsTest, ResultWithoutAPlacementIsRefused) {
  for (uint32_t rank : {0u, 1u}) Bring(rank, {7, 1, false});
  EXPECT_TRUE(absl::IsInvalidArgument(Restore().status()));
}

TEST_F(KeptBucketsTest, WhatWasNotAnnouncedIsRefused) {
  Bring(0, {7, 1});
  ipc::KeptBucket unknown;
  unknown.id = {4, 0};
  EXPECT_TRUE(absl::IsInvalidArgument(kept_.Add(0, unknown, UniqueFd())));
  EXPECT_TRUE(absl::IsInvalidArgument(kept_.AddResult(0, {kId}, UniqueFd())));  // the second one
  EXPECT_TRUE(absl::IsInvalidArgument(kept_.AddResult(1, {kId}, UniqueFd())));
}

TEST_F(KeptBucketsTest, WorkerThatBringsTooLittleIsAwaitedUntilTheDeadlineOrTheJobsEnd) {
  Bring(0, {7, 1});
  EXPECT_TRUE(absl::IsDeadlineExceeded(kept_.Await(Now())));
  outcome_.Fail(absl::AbortedError("the reason"));
  EXPECT_THAT(std::string(kept_.Await(Now() + kTestPatience).message()), HasSubstr("the reason"));
}

}  // namespace
}  // namespace thalweg::kept_buckets_test
