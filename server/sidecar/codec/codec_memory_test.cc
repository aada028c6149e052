// Tests that a node that is taken up from its codecs' memory goes on as one that was never
// disturbed, bit for bit.
#include "server/sidecar/codec/codec_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include "core/base/codec_policy.h"
#include "core/base/protocol.h"
#include "kernels/codec/payload_test_util.h"
#include "server/sidecar/codec/cast_codec.h"
#include "server/sidecar/codec/cpu_lossy.h"
#include "server/sidecar/codec/cpu_power_sgd.h"

namespace thalweg::codec_memory_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Floats = std::vector<float>;

const BucketLayout kBucket{DType::kFloat32, {{"w", {60, 50}}, {"b", {77}}, {"v", {30, 8, 10}}}};

class WholeGradient : public Gradient {
 public:
  explicit WholeGradient(const Floats& values) : Gradient(DType::kFloat32), values_(values) {}
  absl::Status WaitFor(uint64_t /*end*/) override { return absl::OkStatus(); }
  std::vector<const void*> Shares(uint64_t begin) const override {
    return {values_.data() + begin};
  }

 private:
  const Floats& values_;
};

Floats Random(uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  Floats values(kBucket.Elems());
  for (float& v : values) v = normal(rng);
  return values;
}

// A node whose results are its own shares.
class Node {
 public:
  explicit Node(const std::string& codec) : result_(kBucket.Elems()) {
    const CodecPlace place{
        {4, 0}, kMinChunkBytes, 2, false, reinterpret_cast<std::byte*>(result_.data())};
    const CodecSpec spec = CodecPolicy::Parse(codec)->fallback;
    const TensorSet all(kBucket, {0, 1, 2});
    whole_ = std::make_unique<CastCodec>(all, place, 0, DType::kFloat32, false);
    codecs_.push_back(spec.kind == CodecKind::kPowerSgd
                          ? std::unique_ptr<BucketCodec>(
                                *CpuPowerSgd::Create(all, place, 1, DType::kFloat32, spec, states_))
                          : *CpuLossy::Create(all, place, 1, spec, states_));
    memory_ = *CodecMemory::Create(*whole_, codecs_, 2);
  }

  BucketCodec& codec() { return *codecs_[0]; }
  CodecMemory& memory() { return *memory_; }
  ParameterStates& states() { return states_; }
  const Floats& result() const { return result_; }
  // What crossed the network in the last round, by part and chunk.
  const std::map<std::pair<uint32_t, uint32_t>, Bytes>& sent() const { return sent_; }
  // What a worker holds.
  BucketArena Kept() const {
    return *BucketArena::Open(UniqueFd(dup(memory_->arena().fd())),
                              memory_->arena().payload_bytes());
  }

  // Gradients carry this loss scale from now on.
  void SetLossScale(double scale) { loss_scale_ = scale; }
  // What a checkpoint does with the states.
  void SaveStates() {
    ToTrueUnits(states_);
    memory_->NoteUnits();
  }
  // A round that does not use the codec.
  void TakeWholeRound(const Floats& values) {
    BeginRound(*whole_, values, {});
    codec().CountRound();
    memory_->EndRound({whole_.get()});
    round_ += 1;
  }
  void TakeRound(const Floats& values, const std::vector<bool>& unused = {}) {
    BucketCodec& used = codec().HasStarted() ? codec() : *whole_;
    BeginRound(used, values, unused);
    ASSERT_TRUE(used.ReturnResiduals().ok());
    codec().CountRound();
    memory_->EndRound({&used});
    round_ += 1;
  }
  // All but the end: the process dies before it.
  void DieInARound(const Floats& values) {
    BeginRound(codec().HasStarted() ? codec() : *whole_, values, {});
  }
  uint64_t round() const { return round_; }
  absl::Status TakeUp(const Node& other) {
    round_ = other.round_;
    return memory_->Restore(other.Kept(), round_);
  }

 private:
  void BeginRound(BucketCodec& used, const Floats& values, const std::vector<bool>& unused) {
    FoldPool pool(2);
    WholeGradient gradient(values);
    memory_->BeginRound(round_ + 1);
    ASSERT_TRUE(used.FollowLossScale(loss_scale_).ok());
    ASSERT_TRUE(used.WithholdResiduals(unused).ok());
    sent_.clear();
    for (Part* part = *used.Begin(pool, gradient); part != nullptr;
         part = used.EndsWith(*part) ? nullptr : *used.Next(pool, gradient)) {
      part->BeginRound();
      for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
        if (part->round == 1) Place(*part);
        Exchange(used, *part, chunk, gradient);
      }
    }
  }
  void Place(Part& part) {
    part.shard_of_chunk.assign(part.plan.Count(), 1);
    memory_->KeepPlace(part, part.shard_of_chunk, std::vector<uint64_t>{0, 10});
  }
  void Exchange(BucketCodec& used, Part& part, uint32_t chunk, Gradient& gradient) {
    const auto share = *used.Encode(part, chunk, gradient);
    const std::shared_ptr<Bytes> copy = std::make_shared<Bytes>(share.begin(), share.end());
    sent_[{part.bucket.id.part, chunk}] = *copy;
    RoundResult result;
    result.id = {part.bucket.id, chunk, part.round};
    result.wire = part.bucket.wire;
    result.elems = part.plan.Elems(chunk);
    result.payload = Payload(*copy, copy);
    memory_->KeepResult(part, result);
    ASSERT_TRUE(used.Decode(part, result).ok());
  }

  Floats result_;
  ParameterStates states_;
  std::unique_ptr<DenseCodec> whole_;
  CodecMemory::Codecs codecs_;
  std::unique_ptr<CodecMemory> memory_;
  std::map<std::pair<uint32_t, uint32_t>, Bytes> sent_;
  uint64_t round_ = 0;
  double loss_scale_ = kNoLossScale;
};

class CodecMemoryTest : public ::testing::TestWithParam<const char*> {};

TEST_P(CodecMemoryTest, NodeThatDiedInARoundGoesOnBitForBit) {
  for (uint64_t rounds = 0; rounds < 5; ++rounds) {
    Node undisturbed(GetParam()), dying(GetParam()), next(GetParam());
    for (uint64_t round = 0; round < rounds; ++round) {
      for (Node* node : {&undisturbed, &dying}) node->TakeRound(Random(round));
    }
    dying.DieInARound(Random(rounds));
    ASSERT_TRUE(next.TakeUp(dying).ok());
    for (uint64_t round = rounds; round < rounds + 3; ++round) {
      for (Node* node : {&undisturbed, &next}) node->TakeRound(Random(round));
      ASSERT_TRUE(next.sent() == undisturbed.sent()) << "round " << round + 1 << " of " << rounds;
      ASSERT_EQ(next.result(), undisturbed.result());
    }
    EXPECT_EQ(next.codec().rounds(), undisturbed.codec().rounds());
  }
}

TEST_P(CodecMemoryTest, NodeThatDiedTwiceGoesOnBitForBit) {
  Node undisturbed(GetParam()), first(GetParam()), second(GetParam()), third(GetParam());
  for (uint64_t round = 0; round < 4; ++round) {
    for (Node* node : {&undisturbed, &first}) node->TakeRound(Random(round));
  }
  ASSERT_TRUE(second.TakeUp(first).ok());
  second.DieInARound(Random(4));
  ASSERT_TRUE(third.TakeUp(second).ok());
  for (Node* node : {&undisturbed, &third}) node->TakeRound(Random(4));
  EXPECT_TRUE(third.sent() == undisturbed.sent());
}

TEST_P(CodecMemoryTest, PartsComeBackWithTheirPlacesAndLastResults) {
  Node dying(GetParam()), next(GetParam());
  for (uint64_t round = 0; round < 4; ++round) dying.TakeRound(Random(round));
  const auto sent = dying.sent();
  dying.DieInARound(Random(4));
  ASSERT_TRUE(next.TakeUp(dying).ok());
  ASSERT_FALSE(next.memory().was_whole());
  std::map<std::pair<uint32_t, uint32_t>, Bytes> kept;
  for (const CodecMemory::KeptPart& part : next.memory().Parts(8)) {
    EXPECT_EQ(part.shards, std::vector<uint32_t>(part.part->plan.Count(), 1));
    EXPECT_THAT(part.loads, ElementsAre(0, 10));
    for (const RoundResult& result : part.results) {
      EXPECT_EQ(result.id.round, part.part->round);
      EXPECT_EQ(result.workers, 8u);
      const auto& bytes = result.payload.pieces.at(0);
      kept[{result.id.bucket.part, result.id.chunk}].assign(bytes.begin(), bytes.end());
    }
  }
  EXPECT_EQ(kept, sent);
}

TEST_P(CodecMemoryTest, ResidualsOfUnusedTensorsAreKept) {
  Node undisturbed(GetParam()), dying(GetParam()), next(GetParam());
  for (uint64_t round = 0; round < 4; ++round) {
    for (Node* node : {&undisturbed, &dying}) {
      node->TakeRound(Random(round), {false, false, round == 3});
    }
  }
  ASSERT_TRUE(next.TakeUp(dying).ok());
  for (Node* node : {&undisturbed, &next}) node->TakeRound(Random(4));
  EXPECT_TRUE(next.sent() == undisturbed.sent());
}

TEST_P(CodecMemoryTest, RoundThatChangesTheUnitsOfResidualsLeavesTheLastOnesAsTheyAre) {
  Node undisturbed(GetParam()), dying(GetParam()), next(GetParam());
  for (uint64_t round = 0; round < 4; ++round) {
    for (Node* node : {&undisturbed, &dying}) node->TakeRound(Random(round));
  }
  for (Node* node : {&undisturbed, &dying, &next}) node->SetLossScale(1024);
  dying.DieInARound(Random(4));
  ASSERT_TRUE(next.TakeUp(dying).ok());
  for (Node* node : {&undisturbed, &next}) node->TakeRound(Random(4));
  EXPECT_TRUE(next.sent() == undisturbed.sent());
}

TEST_P(CodecMemoryTest, CheckpointLeavesWhatIsKeptAsItIs) {
  Node undisturbed(GetParam()), dying(GetParam()), next(GetParam());
  for (Node* node : {&undisturbed, &dying, &next}) node->SetLossScale(1024);
  for (uint64_t round = 0; round < 4; ++round) {
    for (Node* node : {&undisturbed, &dying}) node->TakeRound(Random(round));
  }
  dying.SaveStates();
  ASSERT_TRUE(next.TakeUp(dying).ok());
  for (Node* node : {&undisturbed, &next}) node->TakeRound(Random(4));
  EXPECT_TRUE(next.sent() == undisturbed.sent());
}

TEST_P(CodecMemoryTest, ResidualsAreKeptInTheUnitsOfACheckpointBeforeRoundsWithoutTheCodec) {
  Node undisturbed(GetParam()), dying(GetParam()), next(GetParam());
  for (Node* node : {&undisturbed, &dying, &next}) node->SetLossScale(1024);
  for (uint64_t round = 0; round < 4; ++round) {
    for (Node* node : {&undisturbed, &dying}) node->TakeRound(Random(round));
  }
  for (Node* node : {&undisturbed, &dying}) {
    node->TakeWholeRound(Random(4));
    node->TakeWholeRound(Random(5));
    node->SaveStates();
    node->TakeWholeRound(Random(6));
  }
  ASSERT_TRUE(next.TakeUp(dying).ok());
  for (Node* node : {&undisturbed, &next}) node->TakeRound(Random(7));
  EXPECT_TRUE(next.sent() == undisturbed.sent());
}

// Residuals then lie where the round makes the next ones.
TEST_P(CodecMemoryTest, NodeThatDiedInTheRoundAfterOneWithoutTheCodecGoesOnBitForBit) {
  Node undisturbed(GetParam()), dying(GetParam()), next(GetParam());
  for (uint64_t round = 0; round < 4; ++round) {
    for (Node* node : {&undisturbed, &dying}) node->TakeRound(Random(round));
  }
  for (Node* node : {&undisturbed, &dying}) node->TakeWholeRound(Random(4));
  dying.DieInARound(Random(5));
  ASSERT_TRUE(next.TakeUp(dying).ok());
  for (uint64_t round = 5; round < 8; ++round) {
    for (Node* node : {&undisturbed, &next}) node->TakeRound(Random(round));
    EXPECT_TRUE(next.sent() == undisturbed.sent()) << "round " << round + 1;
  }
}

TEST_P(CodecMemoryTest, StatesThatWereLoadedAreKept) {
  Node undisturbed(GetParam()), dying(GetParam()), next(GetParam());
  for (uint64_t round = 0; round < 3; ++round) {
    for (Node* node : {&undisturbed, &dying}) node->TakeRound(Random(round));
  }
  for (Node* node : {&undisturbed, &dying}) {
    std::fill_n(node->states().at("w")->residual.data(), 10, 3.0f);
    node->memory().KeepStates();
  }
  ASSERT_TRUE(next.TakeUp(dying).ok());
  for (uint64_t round = 3; round < 5; ++round) {
    for (Node* node : {&undisturbed, &next}) node->TakeRound(Random(round));
  }
  EXPECT_TRUE(next.sent() == undisturbed.sent());
}

INSTANTIATE_TEST_SUITE_P(Codecs, CodecMemoryTest,
                         ::testing::Values("powersgd:rank=2,start=0", "powersgd:rank=2,start=2",
                                           "powersgd:rank=3,start=0,wire=fp16", "int8:start=0",
                                           "onebit:start=1", "topk:start=0,ratio=0.1"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

TEST(CodecMemoryOfABucketTest, RoundThatIsNotOverIsNotThere) {
  Node dying("int8:start=0"), next("int8:start=0");
  dying.TakeRound(Random(0));
  dying.DieInARound(Random(1));
  EXPECT_TRUE(absl::IsDataLoss(next.memory().Restore(dying.Kept(), 2)));
  EXPECT_TRUE(absl::IsDataLoss(next.memory().Restore(dying.Kept(), 3)));
}

TEST(CodecMemoryOfABucketTest, MemoryOfAnotherBucketIsRefused) {
  Node other("onebit:start=0"), next("int8:start=0");
  const absl::Status refused = next.memory().Restore(other.Kept(), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("bytes, expected"));
}

TEST(CodecMemoryOfABucketTest, ResultsOfTheWholeBucketCountUntilItsCodecsHaveStarted) {
  Node node("powersgd:rank=2,start=2");
  node.TakeRound(Random(0));
  EXPECT_TRUE(node.memory().was_whole());
  node.TakeRound(Random(1));
  EXPECT_TRUE(node.memory().was_whole());
  node.TakeRound(Random(2));
  EXPECT_FALSE(node.memory().was_whole());
}

}  // namespace
}  // namespace thalweg::codec_memory_test
