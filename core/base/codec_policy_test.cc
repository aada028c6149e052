#include "core/base/codec_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace thalweg::codec_policy_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

CodecPolicy Policy(const std::string& text) {
  auto policy = CodecPolicy::Parse(text);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return policy.ok() ? *std::move(policy) : CodecPolicy();
}

std::string Refusal(const std::string& text) {
  const auto policy = CodecPolicy::Parse(text);
  return policy.ok() ? "accepted" : std::string(policy.status().message());
}

// Returns the codec that a tensor gets under the policy `text`.
std::string Taken(const std::string& text, const std::string& name, std::vector<int64_t> shape) {
  const CodecPolicy policy = Policy(text);
  return policy.CodecOf({name, std::move(shape)}).Name();
}

bool Fits(const std::string& pattern, const std::string& name) {
  return CodecRule{.name = pattern}.Matches({name, {1}});
}

TEST(CodecPolicyTest, CanonicalTextIsInFullAndInOrder) {
  EXPECT_EQ(Policy("fp16").ToString(), "fp16");
  EXPECT_EQ(Policy(" int8 ; *.bias = fp32 ;\telems<4096 & conv* = topk:0.5\n").ToString(),
            "int8:start=2,feedback=1;*.bias=fp32;"
            "conv*&elems<4096=topk:ratio=0.5,start=2,feedback=1");
  EXPECT_EQ(Policy("fp32;dims<4&dims>1&elems<900&elems>0&a?=bf16;*=fp16;*&dims>0=bf16").ToString(),
            "fp32;a?&elems>0&elems<900&dims>1&dims<4=bf16;*=fp16;dims>0=bf16");
}

TEST(CodecPolicyTest, CanonicalTextMeansTheSame) {
  for (const char* text : {"fp32", "auto:2;*.bias=fp32", "powersgd:4;emb=fp16;elems>1&dims<9=int8",
                           "onebit;*a*&elems<281474976710656=topk:1e-3"}) {
    const CodecPolicy policy = Policy(text);
    EXPECT_EQ(Policy(policy.ToString()), policy);
  }
}

TEST(CodecPolicyTest, FirstRuleThatHoldsDecidesElseTheDefault) {
  const std::string text = "powersgd:4;layer4.*=int8;*.weight=fp16;layer4.0.weight=topk";
  EXPECT_EQ(Taken(text, "layer4.0.weight", {8, 8}), "int8");
  EXPECT_EQ(Taken(text, "layer3.0.weight", {8, 8}), "fp16");
  EXPECT_EQ(Taken(text, "layer3.0.bias", {8}), "powersgd");
}

TEST(CodecPolicyTest, BoundsExcludeTheirNumber) {
  EXPECT_EQ(Taken("fp32;elems<12=fp16", "a", {3, 4}), "fp32");
  EXPECT_EQ(Taken("fp32;elems<13=fp16", "a", {3, 4}), "fp16");
  EXPECT_EQ(Taken("fp32;elems>12=fp16", "a", {3, 4}), "fp32");
  EXPECT_EQ(Taken("fp32;elems>11=fp16", "a", {3, 4}), "fp16");
  EXPECT_EQ(Taken("fp32;dims<2=fp16", "a", {3, 4}), "fp32");
  EXPECT_EQ(Taken("fp32;dims<3=fp16", "a", {3, 4}), "fp16");
  EXPECT_EQ(Taken("fp32;dims>2=fp16", "a", {3, 4}), "fp32");
  EXPECT_EQ(Taken("fp32;dims>1=fp16", "a", {3, 4}), "fp16");
  EXPECT_EQ(Taken("fp32;dims<1=fp16", "scalar", {}), "fp16");
  EXPECT_EQ(Taken("fp32;elems<1=fp16", "empty", {0, 4}), "fp16");
}

TEST(CodecPolicyTest, RuleHoldsOnlyIfAllItsMatchesDo) {
  const std::string text = "fp32;conv*&elems>9&dims<5=fp16";
  EXPECT_EQ(Taken(text, "conv1", {10}), "fp16");
  EXPECT_EQ(Taken(text, "xconv", {10}), "fp32");
  EXPECT_EQ(Taken(text, "conv1", {9}), "fp32");
  EXPECT_EQ(Taken(text, "conv1", {10, 1, 1, 1, 1}), "fp32");
}

TEST(CodecPolicyTest, PatternFitsTheWholeName) {
  EXPECT_TRUE(Fits("a.b", "a.b"));
  EXPECT_FALSE(Fits("a.b", "a.bc"));
  EXPECT_FALSE(Fits("a.b", "a.") || Fits("a.b", "axb") || Fits("a", ""));
  EXPECT_TRUE(Fits("*", "") && Fits("*", "a") && Fits("***", "ab"));
  EXPECT_TRUE(Fits("*bias", "bias") && Fits("*bias", "a.bias") && Fits("*bias", "bias.bias"));
  EXPECT_FALSE(Fits("*bias", "a.bias2"));
  EXPECT_TRUE(Fits("a*c*e", "abcde") && Fits("a*c*e", "ace") && Fits("a*c*e", "accee"));
  EXPECT_FALSE(Fits("a*c*e", "aec") || Fits("a*aa", "aa"));
  EXPECT_TRUE(Fits("l?", "l1") && Fits("?*", "x"));
  EXPECT_FALSE(Fits("l?", "l") || Fits("l?", "l12") || Fits("?*", ""));
  EXPECT_TRUE(Fits("[a]", "[a]"));
  EXPECT_FALSE(Fits("[a]", "a"));
}

TEST(CodecPolicyTest, PatternMadeToBacktrackTakesNoTime) {
  std::string pattern;
  for (int i = 0; i < 1000; ++i) pattern += "*a";
  EXPECT_TRUE(Fits(pattern, std::string(2000, 'a')));
  EXPECT_FALSE(Fits(pattern + "b", std::string(2000, 'a')));
}

TEST(CodecPolicyTest, CodecsAreTheDifferentOnesInOrderOfMention) {
  const auto codecs = Policy("powersgd:4;a=fp32;b=powersgd:rank=4;c=int8;d=fp32").Codecs();
  ASSERT_THAT(codecs, SizeIs(3));
  EXPECT_EQ(codecs[0].Name(), "powersgd");
  EXPECT_EQ(codecs[1].Name(), "fp32");
  EXPECT_EQ(codecs[2].Name(), "int8");
}

TEST(CodecPolicyTest, AutoStandsForItsCandidates) {
  const CodecPolicy policy = Policy("auto:2;emb=fp32;*.bias=bf16");
  std::vector<CodecSpec> expected = AutoCandidates(policy.fallback);
  expected.push_back(*CodecSpec::Parse("bf16"));
  EXPECT_EQ(policy.Codecs(), expected);
  EXPECT_EQ(policy.CodecOf({"weight", {4, 4}}).kind, CodecKind::kAuto);
}

TEST(CodecPolicyTest, OnlyACastWithoutRulesIsPlain) {
  EXPECT_TRUE(Policy("bf16").IsPlainCast());
  EXPECT_FALSE(Policy("fp16;a=fp32").IsPlainCast());
  EXPECT_FALSE(Policy("int8").IsPlainCast());
  EXPECT_FALSE(Policy("auto").IsPlainCast());
}

TEST(CodecPolicyTest, WrongTextIsRefusedNamingThePiece) {
  EXPECT_THAT(Refusal(""), HasSubstr("codec ''"));
  EXPECT_THAT(Refusal("zip;a=fp32"), AllOf(HasSubstr("codec 'zip'"), HasSubstr("powersgd")));
  EXPECT_THAT(Refusal("fp32;"), HasSubstr("rule 1 '': expected MATCH=CODEC"));
  EXPECT_THAT(Refusal("fp32;a=fp16;b"), HasSubstr("rule 2 'b': expected MATCH=CODEC"));
  EXPECT_THAT(Refusal("fp32;a=zip:1"), AllOf(HasSubstr("rule 1"), HasSubstr("codec 'zip:1'")));
  EXPECT_THAT(Refusal("fp32;a=int8:rank=2"), HasSubstr("unknown key 'rank'"));
  EXPECT_THAT(Refusal("fp32;=fp16"), HasSubstr("an empty match"));
  EXPECT_THAT(Refusal("fp32;a&&b=fp16"), HasSubstr("an empty match"));
  EXPECT_THAT(Refusal("fp32;a&b=fp16"), HasSubstr("two patterns, 'a' and 'b'"));
  EXPECT_THAT(Refusal("fp32;size<3=fp16"), HasSubstr("'size<3' is no bound, expected elems<N"));
  EXPECT_THAT(Refusal("fp32;elems<=fp16"), HasSubstr("has the bound '', expected 1 to"));
  EXPECT_THAT(Refusal("fp32;elems<0=fp16"), HasSubstr("'elems<0' has the bound '0'"));
  EXPECT_THAT(Refusal("fp32;dims>x=fp16"), HasSubstr("has the bound 'x', expected 0 to"));
  EXPECT_THAT(Refusal("fp32;elems>281474976710657=fp16"), HasSubstr("to 281474976710656"));
  EXPECT_THAT(Refusal("fp32;dims>1&dims>1=fp16"), HasSubstr("two bounds dims>N"));
}

TEST(CodecPolicyTest, AutoInARuleIsRefused) {
  EXPECT_THAT(Refusal("fp32;a=auto"), HasSubstr("make it the default"));
}

TEST(CodecPolicyTest, MoreThanFiveCodecsAreRefused) {
  const std::string five = "fp32;a=fp16;b=bf16;c=int8;d=onebit";
  EXPECT_THAT(Policy(five).Codecs(), SizeIs(kMaxCodecs));
  EXPECT_THAT(Refusal(five + ";e=topk"), HasSubstr("6 different codecs, at most 5"));
  EXPECT_THAT(Refusal("auto;a=bf16;b=onebit"),
              HasSubstr("6 different codecs, those of auto included, at most 5"));
}

TEST(CodecPolicyTest, LongTextIsRefusedAlsoIfOnlyItsCanonicalFormIsLong) {
  EXPECT_THAT(Refusal(std::string(kMaxPolicyBytes + 1, 'x')), HasSubstr("at most 65536"));
  std::string text = "fp32";
  while (text.size() < kMaxPolicyBytes / 2) text += ";a=powersgd";
  EXPECT_THAT(Refusal(text), HasSubstr("at most 65536 are allowed: let one pattern"));
}

TEST(CodecPolicyTest, WrongRuleIsQuotedInPart) {
  EXPECT_LT(Refusal(absl::StrCat("fp32;", std::string(50'000, 'x'))).size(), 300u);
  std::string characters = "a";  // so that byte 100 is in the middle of one
  while (characters.size() < 200) characters += "é";
  EXPECT_THAT(Refusal(absl::StrCat("fp32;", characters, "=bad")), HasSubstr("éé…'"));
}

// The texts are sentences of the grammar with random mistakes: each is either refused, or accepted
// and then reproduced exactly.
TEST(CodecPolicyTest, AnyTextIsReadOrRefused) {
  const std::vector<std::string> words = {"fp32",  "powersgd",
                                          "int8",  "topk",
                                          "auto",  ":",
                                          ";",     "=",
                                          "&",     ",",
                                          "*",     "?",
                                          "<",     ">",
                                          "elems", "dims",
                                          "start", "4",
                                          "ratio", "-1",
                                          "rank",  " ",
                                          "a",     ".5",
                                          "\xff",  std::string(1, '\0')};
  std::mt19937_64 random(7);
  int accepted = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::string text = random() % 2 == 0 ? "" : "int8;a*&elems<4=fp32;";
    for (uint64_t n = random() % 9; n > 0; --n) text += words[random() % words.size()];
    const auto policy = CodecPolicy::Parse(text);
    if (!policy.ok()) continue;
    ++accepted;
    ASSERT_EQ(Policy(policy->ToString()), *policy) << text;
    ASSERT_EQ(Policy(policy->ToString()).ToString(), policy->ToString()) << text;
  }
  EXPECT_GT(accepted, 100);
}

TEST(CodecPolicyTest, OnlyWorkerNarrowsUnlessTheSidecarCompressesOrSomeAreExcepted) {
  const auto share = [](const char* policy, uint32_t workers,
                        GradientPath path = GradientPath::kCpu) {
    return ShareType(DType::kFloat32, *CodecPolicy::Parse(policy), workers, path);
  };
  EXPECT_EQ(share("fp16", 1), DType::kFloat16);
  EXPECT_EQ(share("fp16", 2), DType::kFloat32);
  EXPECT_EQ(share("fp16;bias=fp32", 1), DType::kFloat32);
  EXPECT_EQ(share("powersgd:wire=fp16", 1), DType::kFloat32);
  EXPECT_EQ(share("int8", 1), DType::kFloat32);
  EXPECT_EQ(share("fp16", 1, GradientPath::kPinned), DType::kFloat32);
  EXPECT_EQ(share("fp16", 1, GradientPath::kPageable), DType::kFloat32);
}

}  // namespace
}  // namespace thalweg::codec_policy_test
