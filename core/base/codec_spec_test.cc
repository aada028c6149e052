#include "core/base/codec_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace thalweg::codec_spec_test {
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
  EXPECT_EQ(CodecSpec::Parse("int8")->ToString(), "int8:start=2,feedback=1");
  EXPECT_EQ(CodecSpec::Parse("onebit:feedback=0,start=0")->ToString(), "onebit:start=0,feedback=0");
  EXPECT_EQ(CodecSpec::Parse("topk")->ToString(), "topk:ratio=0.01,start=2,feedback=1");
  EXPECT_EQ(CodecSpec::Parse("auto:seed=3")->ToString(), "auto:rank=4,start=1000,seed=3");
}

TEST(CodecSpecTest, CanonicalFormMeansTheSame) {
  for (const char* text :
       {"fp32", "bf16", "powersgd:4", "powersgd:rank=8,start=3,wire=fp16",
        "powersgd:min_rate=1.23456789,epsilon=0.1234567", "int8:start=7", "onebit", "topk:1e-3",
        "topk:ratio=0.333333333333333,feedback=0", "auto:rank=1,start=0"}) {
    const auto spec = CodecSpec::Parse(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(*CodecSpec::Parse(spec->ToString()), *spec);
  }
}

// Python writes the same text (client/python/tests/test_codecs.py).
TEST(CodecSpecTest, RealNumbersHaveAsManyDigitsAsItTakes) {
  const auto ratio = [](const char* text) { return CodecSpec::Parse(text)->ToString(); };
  EXPECT_THAT(ratio("topk:0.10"), HasSubstr("ratio=0.1,"));
  EXPECT_THAT(ratio("topk:0.0001234567"), HasSubstr("ratio=0.0001234567,"));
  EXPECT_THAT(ratio("topk:0.00001234567"), HasSubstr("ratio=1.234567e-05,"));
  EXPECT_THAT(ratio("powersgd:min_rate=123456.75"), HasSubstr("min_rate=123456.75,"));
  EXPECT_THAT(ratio("powersgd:min_rate=1000000"), HasSubstr("min_rate=1e+06,"));
}

TEST(CodecSpecTest, LoneValueIsThatOfTheFirstKey) {
  EXPECT_EQ(CodecSpec::Parse("powersgd:4")->rank, 4u);
  EXPECT_EQ(CodecSpec::Parse("auto:2")->rank, 2u);
  EXPECT_EQ(CodecSpec::Parse("topk:0.25")->topk_ratio, 0.25);
}

TEST(CodecSpecTest, WrongTextIsRefusedNamingWhatIsWrong) {
  EXPECT_THAT(Refusal("gzip"), AllOf(HasSubstr("'gzip'"), HasSubstr("powersgd")));
  EXPECT_THAT(Refusal("fp16:2"), HasSubstr("'fp16:2'"));
  EXPECT_THAT(Refusal("fp16:"), HasSubstr("fp16 has no keys"));
  EXPECT_THAT(Refusal("fp64"), HasSubstr("expected one of fp32, fp16, bf16, powersgd, int8"));
  EXPECT_THAT(Refusal(""), HasSubstr("codec ''"));
  EXPECT_THAT(Refusal("powersgd:0"), HasSubstr("rank is '0', expected 1 to 256"));
  EXPECT_THAT(Refusal("powersgd:rank=-1"), HasSubstr("rank is '-1'"));
  EXPECT_THAT(Refusal("powersgd:ranks=4"), AllOf(HasSubstr("'ranks'"), HasSubstr("min_rate")));
  EXPECT_THAT(Refusal("powersgd:rank=4,5"), HasSubstr("unknown key '5'"));
  EXPECT_THAT(Refusal("powersgd:wire=fp64"), HasSubstr("wire is 'fp64', expected fp32, fp16"));
  EXPECT_THAT(Refusal("powersgd:warm=yes"), HasSubstr("expected 0 or 1"));
  EXPECT_THAT(Refusal("powersgd:epsilon=nan"), HasSubstr("epsilon is 'nan'"));
  EXPECT_THAT(Refusal("powersgd:min_rate=inf"), HasSubstr("min_rate is 'inf'"));
  EXPECT_THAT(Refusal("int8:2"), HasSubstr("unknown key '2', known are start, feedback"));
  EXPECT_THAT(Refusal("int8:rank=2"), HasSubstr("unknown key 'rank', known are start, feedback"));
  EXPECT_THAT(Refusal("topk:0"), HasSubstr("ratio is '0', expected a number above 0"));
  EXPECT_THAT(Refusal("topk:1.01"), HasSubstr("ratio is '1.01'"));
  EXPECT_THAT(Refusal("auto:wire=fp16"), HasSubstr("known are rank, start, seed"));
}

TEST(CodecSpecTest, NameIsThatOfTheTextForm) {
  for (const char* name : {"fp32", "fp16", "bf16", "powersgd", "int8", "onebit", "topk", "auto"}) {
    EXPECT_EQ(CodecSpec::Parse(name)->Name(), name);
  }
}

TEST(CodecSpecTest, LossyCodecsHaveTheFormatOfTheirName) {
  for (const char* name : {"int8", "onebit", "topk"}) {
    const auto spec = CodecSpec::Parse(name);
    EXPECT_TRUE(IsLossy(*spec));
    EXPECT_STREQ(Name(LossyFormat(*spec)), name);
  }
  for (const char* name : {"fp16", "powersgd", "auto"}) {
    EXPECT_FALSE(IsLossy(*CodecSpec::Parse(name)));
  }
}

TEST(CodecSpecTest, AutoChoosesFromTheExactToTheCoarse) {
  const auto candidates = AutoCandidates(*CodecSpec::Parse("auto:rank=2,start=5,seed=9"));
  ASSERT_EQ(candidates.size(), 4u);
  EXPECT_EQ(candidates[0], *CodecSpec::Parse("fp32"));
  EXPECT_EQ(candidates[1], *CodecSpec::Parse("fp16"));
  EXPECT_EQ(candidates[2], *CodecSpec::Parse("int8"));
  EXPECT_EQ(candidates[3], *CodecSpec::Parse("powersgd:rank=2,start=5,seed=9"));
}

TEST(CodecSpecTest, OnlyFp32IsNarrowed) {
  const CodecSpec half{.wire = DType::kFloat16};
  EXPECT_EQ(DenseType(DType::kFloat32, half), DType::kFloat16);
  EXPECT_EQ(DenseType(DType::kBFloat16, half), DType::kBFloat16);
  EXPECT_EQ(DenseType(DType::kFloat64, half), DType::kFloat64);
}

}  // namespace
}  // namespace thalweg::codec_spec_test
