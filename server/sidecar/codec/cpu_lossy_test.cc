// Tests that a CpuLossy encodes tensors scattered over a bucket exactly as the kernels encode the
// same values in one piece, in which each tensor begins with a block. The kernels themselves are
// tested in kernels/codec.
#include "server/sidecar/codec/cpu_lossy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/base/protocol.h"
#include "kernels/codec/lossy.h"
#include "kernels/codec/lossy_reference.h"

namespace thalweg::cpu_lossy_test {
namespace {

// Tensors 0, 2 and 3 are compressed: pieces of odd sizes that no chunk, tile or block divides.
const BucketLayout kBucket{DType::kFloat32,
                           {{"a", {77'003}}, {"plain", {501}}, {"b", {13}}, {"c", {40'961, 3}}}};
// The same, of several chunks of topk.
const BucketLayout kLargeBucket{
    DType::kFloat32, {{"a", {77'003}}, {"plain", {501}}, {"b", {13}}, {"c", {40'961, 40}}}};
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

// A node whose results are its own shares.
class LossyNode {
 public:
  LossyNode(const BucketLayout& bucket, const std::vector<uint32_t>& members, const CodecSpec& spec,
            ParameterStates& states)
      : result_(bucket.Elems(), -1.0f) {
    const CodecPlace place{
        {4, 1}, kMinChunkBytes * 16, 2, false, reinterpret_cast<std::byte*>(result_.data())};
    codec_ = *CpuLossy::Create(TensorSet(bucket, members), place, 7, spec, states);
  }

  CpuLossy& codec() { return *codec_; }
  const Floats& result() const { return result_; }
  // Returns the payloads of the last round, by chunk.
  const std::vector<Bytes>& sent() const { return sent_; }

  void Exchange(const Floats& bucket) {
    FloatGradient gradient(bucket);
    FoldPool pool(2);
    Part& part = **codec_->Begin(pool, gradient);
    part.BeginRound();
    sent_.clear();
    for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
      const auto share = *codec_->Encode(part, chunk, gradient);
      sent_.emplace_back(share.begin(), share.end());
      RoundResult result;
      result.id = {part.bucket.id, chunk, part.round};
      result.wire = part.bucket.wire;
      result.elems = part.plan.Elems(chunk);
      result.payload = Payload(share, nullptr);
      ASSERT_TRUE(codec_->Decode(part, result).ok());
    }
    EXPECT_TRUE(codec_->EndsWith(part));
    codec_->CountRound();
  }

 private:
  Floats result_;
  std::unique_ptr<CpuLossy> codec_;
  std::vector<Bytes> sent_;
};

Floats RandomFloats(uint64_t seed, uint64_t elems) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  Floats values(elems);
  for (float& v : values) v = normal(rng);
  return values;
}

class CpuLossyTest : public ::testing::TestWithParam<const char*> {
 protected:
  // Returns the number of elements of which every tensor begins at a multiple.
  uint64_t unit() const { return std::max<uint64_t>(1, FindLossy(format_)->block_elems); }

  // Returns what crosses the network for a vector over the bucket: the tensors, with `padding`
  // between them.
  Floats Padded(const Floats& bucket, float padding = 0) const {
    Floats values;
    auto tensor = bucket.begin();
    for (uint32_t i = 0; i < bucket_.tensors.size(); ++i) {
      const auto end = tensor + static_cast<ptrdiff_t>(bucket_.tensors[i].Elems());
      if (i != 1) {
        values.resize((values.size() + unit() - 1) / unit() * unit(), padding);
        values.insert(values.end(), tensor, end);
      }
      tensor = end;
    }
    return values;
  }
  // Makes the padding zero.
  void Clear(Floats& padded) const {
    const Floats belongs = Padded(Floats(bucket_.Elems(), 1.0f));
    for (size_t i = 0; i < padded.size(); ++i) {
      if (belongs[i] == 0) padded[i] = 0;
    }
  }
  Floats Residual() const {
    Floats bucket;
    for (const TensorSpec& tensor : bucket_.tensors) {
      const auto state = states_.find(tensor.name);
      const Floats none(tensor.Elems());
      std::span<const float> one = none;
      if (state != states_.end()) one = state->second->residual;
      bucket.insert(bucket.end(), one.begin(), one.end());
    }
    return Padded(bucket);
  }

  Floats Random(uint64_t seed) const { return RandomFloats(seed, bucket_.Elems()); }

  const CodecSpec spec_ = *CodecSpec::Parse(GetParam());
  const WireFormat format_ = LossyFormat(spec_);
  const BucketLayout& bucket_ = format_ == WireFormat::kTopK ? kLargeBucket : kBucket;
  ParameterStates states_;
  LossyNode node_{bucket_, kMembers, spec_, states_};
};

TEST_P(CpuLossyTest, ScatteredTensorsAreEncodedAsOneVector) {
  const ChunkPlan plan = node_.codec().FindPart(7)->plan;
  ASSERT_GT(plan.Count(), 3u);
  Floats residual(plan.total_elems);
  for (uint64_t round = 0; round < 3; ++round) {
    Floats gradient = Random(round);
    gradient[5] = std::numeric_limits<float>::infinity();
    node_.Exchange(gradient);
    const Floats values = Padded(gradient);
    ASSERT_EQ(values.size(), plan.total_elems);
    Floats decoded(values.size());
    for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
      const uint64_t begin = plan.Begin(chunk);
      const uint64_t elems = plan.Elems(chunk);
      Bytes expected(MaxEncodedBytes(format_, elems));
      expected.resize(EncodeLossy(format_, spec_.topk_ratio, &values[begin], &residual[begin],
                                  elems, expected.data())
                          .bytes);
      EXPECT_EQ(node_.sent()[chunk], expected) << "chunk " << chunk << ", round " << round;
      ASSERT_TRUE(
          DecodeLossy(Payload(expected, nullptr), format_, DType::kFloat32, elems, &decoded[begin])
              .ok());
    }
    Clear(residual);
    Clear(decoded);
    EXPECT_EQ(Residual(), residual);
    const Floats got = Padded(node_.result());
    EXPECT_EQ(std::memcmp(got.data(), decoded.data(), decoded.size() * sizeof(float)), 0);
    EXPECT_EQ(node_.result()[77'003], -1.0f) << "a tensor of another codec was touched";
  }
}

TEST_P(CpuLossyTest, ResidualFollowsTheLossScale) {
  const auto times = [](std::span<const float> values, float factor) {
    Floats scaled(values.begin(), values.end());
    for (float& value : scaled) value *= factor;
    return scaled;
  };
  ParameterStates plain_states;
  LossyNode plain(bucket_, kMembers, spec_, plain_states);
  uint64_t round = 0;
  for (const float scale : {1024.0f, 2048.0f, 2048.0f, 512.0f}) {
    const Floats gradient = Random(++round);
    ASSERT_TRUE(node_.codec().FollowLossScale(scale).ok());
    plain.Exchange(gradient);
    node_.Exchange(times(gradient, scale));
    EXPECT_EQ(Padded(node_.result()), times(Padded(plain.result()), scale)) << "round " << round;
    for (const char* name : {"a", "b", "c"}) {
      EXPECT_EQ(states_.at(name)->residual, times(plain_states.at(name)->residual, scale)) << name;
    }
  }
}

TEST_P(CpuLossyTest, StartsWhenAllItsParametersHaveSeenEnoughRounds) {
  ASSERT_EQ(spec_.start, 2u);
  node_.codec().CountRound();
  EXPECT_FALSE(node_.codec().HasStarted());
  node_.codec().CountRound();
  EXPECT_TRUE(node_.codec().HasStarted());
  EXPECT_EQ(states_.at("b")->rounds, 2u);
}

TEST_P(CpuLossyTest, ResidualsOfShardsGoThroughTheStateWithoutThoseOfPadding) {
  CpuLossy& codec = node_.codec();
  const Part* part = codec.PartWithShardResiduals();
  ASSERT_EQ(part == nullptr, format_ == WireFormat::kTopK) << "top-k's shards lose nothing";
  if (part == nullptr) return;
  const Floats bucket = Random(9);
  const Floats all = Padded(bucket, 7.0f);
  EXPECT_TRUE(codec.ShardResidual(0).empty());
  for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
    codec.KeepShardResidual(chunk, {&all[part->plan.Begin(chunk)], part->plan.Elems(chunk)});
  }
  EXPECT_EQ(states_.at("a")->shard_residual, Floats(all.begin(), all.begin() + 77'003));
  const Floats expected = Padded(bucket);
  for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
    const auto begin = expected.begin() + static_cast<ptrdiff_t>(part->plan.Begin(chunk));
    EXPECT_EQ(codec.ShardResidual(chunk),
              Floats(begin, begin + static_cast<ptrdiff_t>(part->plan.Elems(chunk))));
  }
  codec.ForgetShardResiduals();
  EXPECT_TRUE(codec.ShardResidual(0).empty());
}

TEST_P(CpuLossyTest, StatesThatWereSavedAndLoadedGoOnBitForBit) {
  for (uint64_t round = 0; round < 2; ++round) node_.Exchange(Random(round));
  Bytes saved(EncodedBytes(states_));
  Encode(states_, saved);
  ParameterStates loaded = *DecodeParameterStates(saved);
  EXPECT_EQ(loaded.at("b")->residual.size(), 13u) << "padding was saved";
  LossyNode other(bucket_, kMembers, spec_, loaded);
  node_.Exchange(Random(2));
  other.Exchange(Random(2));
  EXPECT_EQ(other.sent(), node_.sent());
}

TEST_P(CpuLossyTest, SampledLossIsThatOfTheFirstRound) {
  const Floats gradient = Random(3);
  node_.Exchange(gradient);
  double whole = 0, left = 0;
  for (const float v : Padded(gradient)) whole += static_cast<double>(v) * v;
  for (const float v : Residual()) left += static_cast<double>(v) * v;
  // Sums of doubles in another order: 2^-53 for each term.
  const double bound = 0x1p-53 * static_cast<double>(bucket_.Elems());
  EXPECT_NEAR(node_.codec().loss().whole, whole, bound * whole);
  EXPECT_NEAR(node_.codec().loss().residual, left, bound * left);
}

TEST_P(CpuLossyTest, SampledLossIsThatOfFiniteElements) {
  Floats gradient = Random(3);
  gradient[0] = std::numeric_limits<float>::infinity();
  node_.Exchange(gradient);
  double whole = 0;
  for (const float v : Padded(gradient)) {
    if (std::isfinite(v)) whole += static_cast<double>(v) * v;
  }
  const double bound = 0x1p-53 * static_cast<double>(bucket_.Elems());  // as above
  EXPECT_NEAR(node_.codec().loss().whole, whole, bound * whole);
}

TEST_P(CpuLossyTest, FiniteMeansThatAFloat16BucketMakesInfiniteAreCounted) {
  constexpr uint64_t kElems = 2000;
  std::vector<uint16_t> bucket(kElems);
  const CodecPlace place{
      {4, 1}, kMinChunkBytes * 16, 1, false, reinterpret_cast<std::byte*>(bucket.data())};
  ParameterStates states;
  const BucketLayout layout{DType::kFloat16, {{"a", {kElems}}}};
  const auto codec = *CpuLossy::Create(TensorSet(layout, {0}), place, 7, spec_, states);
  Floats mean = RandomFloats(8, kElems);
  mean[0] = mean[700] = 1e5f;
  FloatGradient gradient(mean);
  FoldPool pool(1);
  for (int round = 0; round < 2; ++round) {  // counted anew in each
    Part& part = **codec->Begin(pool, gradient);
    part.BeginRound();
    ASSERT_EQ(part.plan.Count(), 1u);
    RoundResult result;
    result.id = {part.bucket.id, 0, part.round};
    result.wire = part.bucket.wire;
    result.elems = part.Elems();
    mean.resize(result.elems);
    Bytes bytes(MaxEncodedBytes(format_, result.elems));
    bytes.resize(
        EncodeLossy(format_, 0.01, mean.data(), nullptr, result.elems, bytes.data()).bytes);
    result.payload = Payload(bytes, nullptr);
    ASSERT_TRUE(codec->Decode(part, result).ok());
    const auto infinite = std::count_if(bucket.begin(), bucket.end(),
                                        [](uint16_t bits) { return (bits & 0x7fffu) == 0x7c00u; });
    EXPECT_EQ(codec->nonfinite_elems(), static_cast<uint64_t>(infinite));
    if (format_ != WireFormat::kOneBit) {
      EXPECT_EQ(infinite, 2);
    }
  }
}

TEST_P(CpuLossyTest, StateOfAnotherSizeIsRefused) {
  ParameterStates states;
  states["b"] = std::make_shared<ParameterState>();
  states["b"]->residual.Resize(12);
  const CodecPlace place{{}, kMinChunkBytes, 1};
  const auto codec = CpuLossy::Create(TensorSet(bucket_, kMembers), place, 1, spec_, states);
  EXPECT_EQ(codec.status().code(), absl::StatusCode::kInvalidArgument) << codec.status();
}

INSTANTIATE_TEST_SUITE_P(Formats, CpuLossyTest, ::testing::Values("int8", "onebit", "topk:0.01"),
                         [](const auto& info) { return CodecSpec::Parse(info.param)->Name(); });

// Formats with blocks.
class CpuLossyBlocksTest : public CpuLossyTest {
 protected:
  ReferenceChunk Reference(const Floats& x) const {
    return format_ == WireFormat::kInt8 ? ReferenceInt8(x) : ReferenceOneBit(x);
  }
};

TEST_P(CpuLossyBlocksTest, EveryTensorIsEncodedAsIfItWereAlone) {
  const Floats gradient = Random(4);
  node_.Exchange(gradient);
  Bytes expected;
  uint64_t begin = 0;
  for (const TensorSpec& tensor : bucket_.tensors) {
    const uint64_t end = begin + tensor.Elems();
    if (tensor.name != "plain") {
      Floats alone(&gradient[begin], &gradient[end]);
      // The last tensor ends with a short block.
      if (tensor.name != "c") alone.resize((alone.size() + unit() - 1) / unit() * unit());
      const ReferenceChunk reference = Reference(alone);
      expected.insert(expected.end(), reference.bytes.begin(), reference.bytes.end());
      EXPECT_EQ(std::memcmp(&node_.result()[begin], reference.decoded.data(),
                            tensor.Elems() * sizeof(float)),
                0)
          << tensor.name;
    }
    begin = end;
  }
  Bytes sent;
  for (const Bytes& chunk : node_.sent()) sent.insert(sent.end(), chunk.begin(), chunk.end());
  EXPECT_EQ(sent, expected);
}

TEST_P(CpuLossyBlocksTest, OneElementBesideALargeTensorIsExactToItsOwnScale) {
  const BucketLayout bucket{DType::kFloat32, {{"first", {1}}, {"large", {5000}}, {"last", {1}}}};
  Floats gradient = RandomFloats(5, bucket.Elems());
  for (float& value : gradient) value *= 1e6f;
  const float small = 0.3f;
  gradient.front() = gradient.back() = small;
  ParameterStates states;
  LossyNode node(bucket, {0, 1, 2}, spec_, states);
  node.Exchange(gradient);
  // int8 rounds twice: the scale, and 125 times it. Of onebit's rotated block all 1024 magnitudes
  // are the same; in each of sixteen sums 63 additions round.
  const float tolerance = small * (format_ == WireFormat::kInt8 ? 2 : 64) * 0x1p-24f;
  EXPECT_NEAR(node.result().front(), small, tolerance);
  EXPECT_NEAR(node.result().back(), small, tolerance);
}

INSTANTIATE_TEST_SUITE_P(Formats, CpuLossyBlocksTest, ::testing::Values("int8", "onebit"),
                         [](const auto& info) { return CodecSpec::Parse(info.param)->Name(); });

}  // namespace
}  // namespace thalweg::cpu_lossy_test
