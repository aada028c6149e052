// That a CpuLossy encodes what lies scattered over a bucket exactly as the kernels encode the
// same values in one piece. What the kernels make of them is tested in kernels/codec.
#include "server/sidecar/codec/cpu_lossy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/base/protocol.h"
#include "kernels/codec/lossy.h"

namespace thalweg {
namespace {

using Floats = std::vector<float>;

// Tensors 0, 2 and 3 are compressed: pieces of odd sizes that no chunk, tile or block divides.
const BucketLayout kBucket{DType::kFloat32,
                           {{"a", {77'003}}, {"plain", {501}}, {"b", {13}}, {"c", {40'960, 3}}}};
const std::vector<uint32_t> kMembers = {0, 2, 3};

class FloatGradient : public Gradient {
 public:
  explicit FloatGradient(const Floats& values) : Gradient(DType::kFloat32), values_(values) {}
  absl::Status WaitFor(uint64_t end) override {
    waited_for_ = std::max(waited_for_, end);
    return absl::OkStatus();
  }
  std::vector<const void*> Shares(uint64_t begin) const override {
    EXPECT_LT(begin, waited_for_);
    return {values_.data() + begin};
  }

 private:
  const Floats& values_;
  uint64_t waited_for_ = 0;
};

class CpuLossyTest : public ::testing::TestWithParam<const char*> {
 protected:
  CpuLossyTest()
      : spec_(*CodecSpec::Parse(GetParam())),
        format_(LossyFormat(spec_)),
        result_(kBucket.Elems(), -1.0f) {
    const CodecPlace place{
        {4, 1}, kMinChunkBytes * 16, 2, false, reinterpret_cast<std::byte*>(result_.data())};
    codec_ = *CpuLossy::Create(TensorSet(kBucket, kMembers), place, 7, spec_, states_);
  }

  // The set's elements out of a vector over the bucket.
  static Floats Gathered(const Floats& bucket) {
    const TensorSet set(kBucket, kMembers);
    Floats values;
    for (const auto& piece : set.BucketPieces(0, set.Elems())) {
      const auto begin = bucket.begin() + static_cast<ptrdiff_t>(piece.offset);
      values.insert(values.end(), begin, begin + static_cast<ptrdiff_t>(piece.elems));
    }
    return values;
  }
  Floats Residual() const {
    Floats residual;
    for (const char* name : {"a", "b", "c"}) {
      const Floats& one = states_.at(name)->residual;
      residual.insert(residual.end(), one.begin(), one.end());
    }
    return residual;
  }
  Floats Random(uint64_t seed) const {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    Floats values(kBucket.Elems());
    for (float& v : values) v = normal(rng);
    return values;
  }

  // One round whose result is this node's own share.
  void Exchange(const Floats& bucket) { Exchange(bucket, *codec_); }
  void Exchange(const Floats& bucket, CpuLossy& codec) {
    FloatGradient gradient(bucket);
    FoldPool pool(2);
    Part& part = **codec.Begin(pool, gradient);
    part.BeginRound();
    encoded_.clear();
    for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
      const auto share = *codec.Encode(part, chunk, gradient);
      encoded_.emplace_back(share.begin(), share.end());
      RoundResult result;
      result.id = {part.bucket.id, chunk, part.round};
      result.wire = format_;
      result.elems = part.plan.Elems(chunk);
      result.payload = Payload(share, nullptr);
      ASSERT_TRUE(codec.Decode(part, result).ok());
    }
    EXPECT_TRUE(codec.EndsWith(part));
    codec.CountRound();
  }

  const CodecSpec spec_;
  const WireFormat format_;
  ParameterStates states_;
  Floats result_;
  std::unique_ptr<CpuLossy> codec_;
  std::vector<std::vector<std::byte>> encoded_;  // by chunk
};

TEST_P(CpuLossyTest, ScatteredTensorsAreEncodedAsOneVector) {
  const ChunkPlan plan = codec_->FindPart(7)->plan;
  ASSERT_GT(plan.Count(), 3u);
  Floats residual(plan.total_elems);
  for (uint64_t round = 0; round < 3; ++round) {
    Floats gradient = Random(round);
    gradient[5] = std::numeric_limits<float>::infinity();
    Exchange(gradient);
    const Floats values = Gathered(gradient);
    Floats decoded(values.size());
    for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
      const uint64_t begin = plan.Begin(chunk);
      const uint64_t elems = plan.Elems(chunk);
      std::vector<std::byte> expected(MaxEncodedBytes(format_, elems));
      expected.resize(EncodeLossy(format_, spec_.topk_ratio, &values[begin], &residual[begin],
                                  elems, expected.data())
                          .bytes);
      EXPECT_EQ(encoded_[chunk], expected) << "chunk " << chunk << ", round " << round;
      ASSERT_TRUE(
          DecodeLossy(Payload(expected, nullptr), format_, DType::kFloat32, elems, &decoded[begin])
              .ok());
    }
    EXPECT_EQ(Residual(), residual);
    const Floats got = Gathered(result_);
    EXPECT_EQ(std::memcmp(got.data(), decoded.data(), decoded.size() * sizeof(float)), 0);
    EXPECT_EQ(result_[77'003], -1.0f) << "a tensor of another codec was touched";
  }
}

TEST_P(CpuLossyTest, ResidualFollowsTheLossScale) {
  const auto times = [](Floats values, float factor) {
    for (float& value : values) value *= factor;
    return values;
  };
  ParameterStates plain_states;
  Floats plain_result(kBucket.Elems());
  const CodecPlace place{
      {4, 1}, kMinChunkBytes * 16, 2, false, reinterpret_cast<std::byte*>(plain_result.data())};
  const auto plain = *CpuLossy::Create(TensorSet(kBucket, kMembers), place, 7, spec_, plain_states);
  uint64_t round = 0;
  for (const float scale : {1024.0f, 2048.0f, 2048.0f, 512.0f}) {
    const Floats gradient = Random(++round);
    ASSERT_TRUE(codec_->FollowLossScale(scale).ok());
    Exchange(gradient, *plain);
    Exchange(times(gradient, scale));
    EXPECT_EQ(Gathered(result_), times(Gathered(plain_result), scale)) << "round " << round;
    for (const char* name : {"a", "b", "c"}) {
      EXPECT_EQ(states_.at(name)->residual, times(plain_states.at(name)->residual, scale)) << name;
    }
  }
}

TEST_P(CpuLossyTest, StartsWhenAllItsParametersHaveSeenEnoughRounds) {
  ASSERT_EQ(spec_.start, 2u);
  codec_->CountRound();
  EXPECT_FALSE(codec_->HasStarted());
  codec_->CountRound();
  EXPECT_TRUE(codec_->HasStarted());
  EXPECT_EQ(states_.at("b")->rounds, 2u);
}

TEST_P(CpuLossyTest, ResidualsOfShardsGoThroughTheState) {
  const Part* part = codec_->PartWithShardResiduals();
  ASSERT_EQ(part == nullptr, format_ == WireFormat::kTopK) << "top-k's shards lose nothing";
  if (part == nullptr) return;
  const Floats all = Gathered(Random(9));
  EXPECT_TRUE(codec_->ShardResidual(0).empty());
  for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
    codec_->KeepShardResidual(chunk, {&all[part->plan.Begin(chunk)], part->plan.Elems(chunk)});
  }
  EXPECT_EQ(states_.at("a")->shard_residual, Floats(all.begin(), all.begin() + 77'003));
  for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
    const auto begin = all.begin() + static_cast<ptrdiff_t>(part->plan.Begin(chunk));
    EXPECT_EQ(codec_->ShardResidual(chunk),
              Floats(begin, begin + static_cast<ptrdiff_t>(part->plan.Elems(chunk))));
  }
  codec_->ForgetShardResiduals();
  EXPECT_TRUE(codec_->ShardResidual(0).empty());
}

TEST_P(CpuLossyTest, SampledLossIsThatOfTheFirstRound) {
  const Floats gradient = Random(3);
  Exchange(gradient);
  double whole = 0, left = 0;
  for (const float v : Gathered(gradient)) whole += static_cast<double>(v) * v;
  for (const float v : Residual()) left += static_cast<double>(v) * v;
  // Sums of doubles in another order: 2^-53 for each of 2e5 terms.
  EXPECT_NEAR(codec_->loss().whole, whole, 1e-10 * whole);
  EXPECT_NEAR(codec_->loss().residual, left, 1e-10 * left);
}

TEST_P(CpuLossyTest, StateOfAnotherSizeIsRefused) {
  ParameterStates states;
  states["b"] = std::make_shared<ParameterState>();
  states["b"]->residual.resize(12);
  const CodecPlace place{{}, kMinChunkBytes, 1};
  const auto codec = CpuLossy::Create(TensorSet(kBucket, kMembers), place, 1, spec_, states);
  EXPECT_EQ(codec.status().code(), absl::StatusCode::kInvalidArgument) << codec.status();
}

INSTANTIATE_TEST_SUITE_P(Formats, CpuLossyTest, ::testing::Values("int8", "onebit", "topk:0.01"),
                         [](const auto& info) { return CodecSpec::Parse(info.param)->Name(); });

}  // namespace
}  // namespace thalweg
