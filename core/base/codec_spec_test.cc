#include "core/base/codec_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace thalweg {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Refusal(const std::string& text) {
  const auto spec = CodecSpec::Parse(text);
  return spec.ok() ? "accepted" : std::string(spec.status().message());
}

TEST(CodecSpecTest, CanonicalFormHasEveryKeyInOrder) {
  EXPECT_EQ(CodecSpec::Parse("fp16")->ToString(), "fp16");
  EXPECT_EQ(CodecSpec::Parse("powersgd")->ToString(),
            "powersgd:rank=1,start=1000,min_rate=2,wire=fp32,warm=1,feedback=1,seed=0,epsilon=0");
  EXPECT_EQ(CodecSpec::Parse("powersgd:epsilon=1e-08,wire=bf16,rank=4,feedback=0,warm=0,seed=7,"
                             "min_rate=1.5,start=0")
                ->ToString(),
            "powersgd:rank=4,start=0,min_rate=1.5,wire=bf16,warm=0,feedback=0,seed=7,"
            "epsilon=1e-08");
}

TEST(CodecSpecTest, CanonicalFormMeansTheSame) {
  for (const char* text : {"fp32", "bf16", "powersgd:4", "powersgd:rank=8,start=3,wire=fp16"}) {
    const auto spec = CodecSpec::Parse(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(*CodecSpec::Parse(spec->ToString()), *spec);
  }
}

TEST(CodecSpecTest, LoneNumberIsTheRank) { EXPECT_EQ(CodecSpec::Parse("powersgd:4")->rank, 4u); }

TEST(CodecSpecTest, WrongTextIsRefusedNamingWhatIsWrong) {
  EXPECT_THAT(Refusal("gzip"), AllOf(HasSubstr("'gzip'"), HasSubstr("powersgd")));
  EXPECT_THAT(Refusal("fp16:2"), HasSubstr("'fp16:2'"));
  EXPECT_THAT(Refusal("fp64"), HasSubstr("expected fp32, fp16, bf16"));
  EXPECT_THAT(Refusal(""), HasSubstr("codec ''"));
  EXPECT_THAT(Refusal("powersgd:0"), HasSubstr("rank is '0', expected 1 to 256"));
  EXPECT_THAT(Refusal("powersgd:rank=-1"), HasSubstr("rank is '-1'"));
  EXPECT_THAT(Refusal("powersgd:ranks=4"), AllOf(HasSubstr("'ranks'"), HasSubstr("min_rate")));
  EXPECT_THAT(Refusal("powersgd:rank=4,5"), HasSubstr("unknown key '5'"));
  EXPECT_THAT(Refusal("powersgd:wire=fp64"), HasSubstr("wire is 'fp64', expected fp32, fp16"));
  EXPECT_THAT(Refusal("powersgd:warm=yes"), HasSubstr("expected 0 or 1"));
  EXPECT_THAT(Refusal("powersgd:epsilon=nan"), HasSubstr("epsilon is 'nan'"));
  EXPECT_THAT(Refusal("powersgd:min_rate=inf"), HasSubstr("min_rate is 'inf'"));
}

TEST(CodecSpecTest, OnlyFp32IsNarrowed) {
  const CodecSpec half{.wire = DType::kFloat16};
  EXPECT_EQ(DenseType(DType::kFloat32, half), DType::kFloat16);
  EXPECT_EQ(DenseType(DType::kBFloat16, half), DType::kBFloat16);
  EXPECT_EQ(DenseType(DType::kFloat64, half), DType::kFloat64);
}

TEST(CodecSpecTest, OnlyWorkerNarrowsUnlessTheSidecarCompresses) {
  const CodecSpec half{.wire = DType::kFloat16};
  const CodecSpec factors{.kind = CodecKind::kPowerSgd, .wire = DType::kFloat16};
  EXPECT_EQ(ShareType(DType::kFloat32, half, 1), DType::kFloat16);
  EXPECT_EQ(ShareType(DType::kFloat32, half, 2), DType::kFloat32);
  EXPECT_EQ(ShareType(DType::kFloat32, factors, 1), DType::kFloat32);
}

}  // namespace
}  // namespace thalweg
