#include "server/sidecar/bucket/make_codecs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/protocol.h"
#include "server/sidecar/device/cpu_device.h"

namespace thalweg::make_codecs_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

BucketLayout Layout(DType dtype = DType::kFloat32) {
  return {dtype,
          {{"embed", {512, 64}}, {"fc.weight", {128, 64}}, {"fc.bias", {128}}, {"none", {0}}}};
}

class MakeCodecsTest : public ::testing::Test {
 protected:
  // "codec: tensors" of each codec.
  std::vector<std::string> Make(const char* policy, DType dtype = DType::kFloat32,
                                uint32_t auto_choice = 0) {
    policy_ = *CodecPolicy::Parse(policy);
    const CodecChoice choice{policy_, auto_choice};
    const CodecPlace place{{1}, kMinChunkBytes, 1};
    memory_ = *CpuDevice().MakeMemory({{1}, Layout(dtype), dtype, 1});
    made_ = *MakeCodecs(Layout(dtype), *memory_, place, choice, states_);
    std::vector<std::string> names;
    for (const auto& codec : made_) {
      std::string name = codec->name() + ":";
      for (const TensorSpec& tensor : codec->tensors().layout().tensors) name += " " + tensor.name;
      names.push_back(name);
    }
    dense_ = MakeDenseCodec(Layout(dtype), *memory_, place, choice)->wire();
    return names;
  }

  std::unique_ptr<BucketMemory> memory_;
  ParameterStates states_;
  CodecPolicy policy_;
  std::vector<std::unique_ptr<BucketCodec>> made_;
  DType dense_ = DType::kFloat32;
};

TEST_F(MakeCodecsTest, OneTypeForAllNeedsNoCodec) {
  EXPECT_THAT(Make("fp16"), IsEmpty());
  EXPECT_EQ(dense_, DType::kFloat16);
  EXPECT_THAT(Make("fp16;*bias=fp16"), IsEmpty());
  EXPECT_THAT(Make("powersgd:rank=64"), IsEmpty()) << "nothing to gain by such a rank";
  EXPECT_THAT(Make("powersgd:rank=64;embed=fp32"), IsEmpty());
}

TEST_F(MakeCodecsTest, RulesTakeTensorsOutOfTheDefault) {
  EXPECT_THAT(Make("int8;embed=fp32"), ElementsAre("int8: fc.weight fc.bias", "fp32: embed"));
  EXPECT_THAT(Make("powersgd:4;embed=topk:0.01;dims<2=fp16"),
              ElementsAre("powersgd: fc.weight", "topk: embed", "fp16: fc.bias"));
  EXPECT_EQ(dense_, DType::kFloat32) << "the widest of all";
}

TEST_F(MakeCodecsTest, TwoTypesAreTwoCodecsAndStartAtOnce) {
  EXPECT_THAT(Make("fp16;*bias=bf16"), ElementsAre("fp16: embed fc.weight", "bf16: fc.bias"));
  EXPECT_EQ(dense_, DType::kFloat32);
  for (const auto& codec : made_) EXPECT_TRUE(codec->HasStarted());
}

TEST_F(MakeCodecsTest, ChoiceOfAutoIsOneOfItsCandidates) {
  const std::vector<CodecSpec> candidates = CodecPolicy::Parse("auto")->Codecs();
  for (uint32_t k = 0; k < candidates.size(); ++k) {
    const auto made = Make("auto", DType::kFloat32, k);
    if (candidates[k].kind == CodecKind::kCast) {
      EXPECT_THAT(made, IsEmpty());
      EXPECT_EQ(dense_, candidates[k].wire);
    } else {
      EXPECT_THAT(made, ElementsAre(candidates[k].Name() + ": embed fc.weight fc.bias"));
    }
  }
}

TEST_F(MakeCodecsTest, PartsOfACodecAreNumberedByItsPlaceInThePolicy) {
  Make("powersgd:4;embed=int8;*bias=onebit");
  EXPECT_NE(made_[0]->FindPart(1), nullptr);
  EXPECT_NE(made_[0]->FindPart(2), nullptr);
  EXPECT_NE(made_[0]->FindPart(3), nullptr);
  EXPECT_NE(made_[1]->FindPart(4), nullptr);
  EXPECT_EQ(made_[1]->FindPart(5), nullptr);
  EXPECT_NE(made_[2]->FindPart(7), nullptr);
  EXPECT_EQ(made_[2]->FindPart(7)->bucket.wire, WireFormat::kOneBit);
}

TEST_F(MakeCodecsTest, Float64KeepsItsDigits) {
  EXPECT_THAT(Make("int8;embed=powersgd:2", DType::kFloat64), IsEmpty());
  EXPECT_EQ(dense_, DType::kFloat64);
}

}  // namespace
}  // namespace thalweg::make_codecs_test
