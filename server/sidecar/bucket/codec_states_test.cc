#include "server/sidecar/bucket/codec_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/sidecar/testing/job_test_util.h"

namespace thalweg::codec_states_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kElems = 1500;

// A job whose only worker sends int8, whose codecs carry residuals.
class CodecStatesTest : public BucketsFixture {
 protected:
  CodecStatesTest() : BucketsFixture(HelloOf(0, 1, "int8:start=0")) {}

  // A round that nobody but this node takes part in.
  void TakeThroughARound(TestBucket& made, float value) {
    NodeBucket& bucket = *made.bucket;
    made.Fill(value);
    ASSERT_TRUE(*bucket.Submit(0, {bucket.id(), bucket.round().number() + 1}, Now()));
    states_.AwaitUse();
    bucket.BeginRound(kUnknownLossScale);
    ASSERT_EQ(bucket.round().codecs().size(), 1u);
    bucket.FinishRound(Now());
  }
  uint64_t RoundsIn(const BucketArena& arena) {
    const auto states = DecodeParameterStates({arena.payload(), arena.payload_bytes()});
    return states.ok() && states->count("w0") > 0 ? states->at("w0")->rounds : 0;
  }
};

TEST_F(CodecStatesTest, WhatIsLoadedIsWhatWasSaved) {
  TestBucket bucket = Announce(table_, 0, kElems, 1);
  for (int round = 0; round < 3; ++round) TakeThroughARound(bucket, 1);
  const auto saved = states_.Save(table_.All(), nullptr, kTestPatience, [] {});
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(RoundsIn(*saved), 3u);
  TakeThroughARound(bucket, 1);
  ASSERT_TRUE(states_.Load(table_.All(), *saved, true).ok());
  TakeThroughARound(bucket, 1);
  EXPECT_EQ(RoundsIn(*states_.Save(table_.All(), nullptr, kTestPatience, [] {})), 4u);
}

TEST_F(CodecStatesTest, StatesAreSavedInTrueUnitsAndGoOnInThoseOfTheNextRound) {
  TestBucket bucket = Announce(table_, 0, kElems, 1);
  ParameterStates states;
  states["w0"] = std::make_shared<ParameterState>();
  states["w0"]->residual = std::vector<float>(kElems, 3);
  auto arena = *BucketArena::Create("states", EncodedBytes(states), true);
  Encode(states, {arena.payload(), arena.payload_bytes()});
  ASSERT_TRUE(states_.Load(table_.All(), arena, true).ok());
  BucketCodec& codec = *bucket.bucket->compressing()[0];
  for (const double scale : {1024.0, 2048.0}) {
    ASSERT_TRUE(codec.FollowLossScale(scale).ok());
    const auto saved = states_.Save(table_.All(), nullptr, kTestPatience, [] {});
    ASSERT_TRUE(saved.ok()) << saved.status();
    const auto read = DecodeParameterStates({saved->payload(), saved->payload_bytes()});
    EXPECT_EQ(read->at("w0")->residual, std::vector<float>(kElems, 3));
  }
}

TEST_F(CodecStatesTest, FirstNodeHasShardsDropWhatALoadedStateLacks) {
  TestBucket bucket = Announce(table_, 0, kElems, 1);
  BucketCodec& codec = *bucket.bucket->compressing()[0];
  auto nothing = *BucketArena::Create("states", EncodedBytes({}), true);
  Encode({}, {nothing.payload(), nothing.payload_bytes()});
  ASSERT_TRUE(states_.Load(table_.All(), nothing, true).ok());
  EXPECT_FALSE(codec.keeps_shard_residuals()) << "no round has left any there";
  TakeThroughARound(bucket, 1);
  codec.FindPart(codec.PartWithShardResiduals()->bucket.id.part)->round = 1;
  ASSERT_TRUE(states_.Load(table_.All(), nothing, false).ok());
  EXPECT_FALSE(codec.keeps_shard_residuals());
  ASSERT_TRUE(states_.Load(table_.All(), nothing, true).ok());
  EXPECT_THAT(codec.ShardResidual(0), AllOf(Not(IsEmpty()), Each(0)));
  EXPECT_EQ(RoundsIn(*states_.Save(table_.All(), nullptr, kTestPatience, [] {})), 0u);
}

class SharedStatesTest : public BucketsFixture {
 protected:
  SharedStatesTest() : BucketsFixture(HelloOf(0, 1, "int8:start=0"), true) {}
};

TEST_F(SharedStatesTest, WorkersHearOfEachChunkThatShardsHaveAnsweredFor) {
  TestBucket bucket = Announce(table_, 0, 3 * kElems, 1);
  BucketCodec& codec = *bucket.bucket->compressing()[0];
  Part& part = *codec.FindPart(codec.PartWithShardResiduals()->bucket.id.part);
  part.round = 1;
  part.shard_of_chunk.assign(part.plan.Count(), 0);
  ASSERT_EQ(part.plan.Count(), 2u);
  int heard = 0;
  const auto alive = [&heard] { ++heard; };
  ASSERT_TRUE(states_.Save(table_.All(), &shards_, kTestPatience, alive).ok());
  EXPECT_EQ(heard, 2);
  ASSERT_TRUE(states_.MoveShardResiduals(table_.All(), 1, shards_, kTestPatience, alive).ok());
  EXPECT_EQ(heard, 4);
}

TEST_F(CodecStatesTest, NewLayoutGoesOnWithTheStatesOfTheOldOne) {
  TestBucket old = Announce(table_, 0, kElems, 1);
  TakeThroughARound(old, 1);
  const BucketLayout layout = old.bucket->layout();
  auto input = *BucketArena::Create("input", kElems * 4, true);
  ASSERT_TRUE(table_.Announce(0, "rank 5", {{0, 1}, layout, {}}, UniqueFd(dup(input.fd()))).ok());
  TestBucket next{table_.Find(0), {}};
  next.inputs.push_back(std::move(input));
  EXPECT_NE(next.bucket, old.bucket);
  TakeThroughARound(next, 1);
  EXPECT_EQ(RoundsIn(*states_.Save(table_.All(), nullptr, kTestPatience, [] {})), 2u);
}

TEST_F(CodecStatesTest, NeitherSavesNorLoadsWhileARoundIsInFlight) {
  TestBucket bucket = Announce(table_, 0, kElems, 1);
  const auto saved = states_.Save(table_.All(), nullptr, kTestPatience, [] {});
  ASSERT_TRUE(saved.ok());
  ASSERT_TRUE(*bucket.bucket->Submit(0, {bucket.bucket->id(), 1}, Now()));
  for (const absl::Status& status :
       {states_.Save(table_.All(), nullptr, kTestPatience, [] {}).status(),
        states_.Load(table_.All(), *saved, true)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("round 1 of bucket 0 was in flight"));
  }
}

TEST_F(CodecStatesTest, BytesThatAreNoStatesAreRefused) {
  auto arena = *BucketArena::Create("states", 8, true);
  EXPECT_EQ(states_.Load(table_.All(), arena, true).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CodecStatesTest, LayoutIsReplacedOnlyBetweenRoundsAndByANewerOne) {
  TestBucket bucket = Announce(table_, 0, kElems, 1);
  const BucketLayout layout = bucket.bucket->layout();
  ASSERT_TRUE(*bucket.bucket->Submit(0, {bucket.bucket->id(), 1}, Now()));
  const auto announce = [&](uint32_t generation) {
    return table_.Announce(0, "rank 5", {{0, generation}, layout, {}},
                           UniqueFd(dup(bucket.inputs[0].fd())));
  };
  EXPECT_THAT(std::string(announce(1).status().message()),
              HasSubstr("while a round of its earlier layout is in flight"));
  bucket.bucket->BeginRound(kUnknownLossScale);
  bucket.bucket->FinishRound(Now());
  EXPECT_TRUE(announce(1).ok());
  EXPECT_THAT(std::string(announce(0).status().message()), HasSubstr("has replaced that layout"));
}

}  // namespace
}  // namespace thalweg::codec_states_test
