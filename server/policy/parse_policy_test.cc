#include "server/policy/parse_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace thalweg::parse_policy_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// Returns what is wrong with the text.
std::string ErrorOf(const std::string& text) {
  const auto policy = ParsePolicy(text, "file");
  EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(policy.status().message());
}

TEST(ParsePolicyTest, EveryFieldIsRead) {
  const auto policy = ParsePolicy(R"(
      # The team that pays.
      tenant {
        name: "a"
        spiffe_id: "spiffe://c/a/*" spiffe_id: "spiffe://c/b"
        dns_name: ["*.a.example"]
        common_name: "node-*"
        job: "a-*" job: "shared"
        max_jobs: 0
        max_memory_bytes: 9000000000
      }
      tenant { name: "b" common_name: "b" job: "*" })",
                                  "file");
  ASSERT_TRUE(policy.ok()) << policy.status();
  ASSERT_EQ(policy->tenants.size(), 2u);
  const Tenant& a = policy->tenants[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_THAT(a.spiffe_ids, ElementsAre("spiffe://c/a/*", "spiffe://c/b"));
  EXPECT_THAT(a.dns_names, ElementsAre("*.a.example"));
  EXPECT_THAT(a.common_names, ElementsAre("node-*"));
  EXPECT_THAT(a.jobs, ElementsAre("a-*", "shared"));
  EXPECT_EQ(a.max_jobs, 0u);
  EXPECT_EQ(a.max_memory_bytes, 9'000'000'000u);
  const Tenant& b = policy->tenants[1];
  EXPECT_THAT(b.spiffe_ids, IsEmpty());
  EXPECT_EQ(b.max_jobs, std::nullopt);
  EXPECT_EQ(b.max_memory_bytes, std::nullopt);
}

TEST(ParsePolicyTest, ErrorsNameTheLine) {
  EXPECT_THAT(ErrorOf("tenant {\n  colour: \"a\"\n}"), StartsWith("file:2:9: "));
  EXPECT_THAT(ErrorOf("tenant {\n  max_jobs: -1\n}"), StartsWith("file:2:"));
  EXPECT_THAT(ErrorOf("\n\ntenant {"), StartsWith("file:3:"));
  EXPECT_THAT(
      ErrorOf("tenant {\n name: \"a\"\n common_name: \"x\" common_name: \"a*b\"\n job: \"j\" }"),
      StartsWith("file:3:19: common_name 'a*b': expected"));
  EXPECT_THAT(ErrorOf("tenant { name: \"a\" common_name: \"x\" job: \"j\" }\n"
                      "tenant { name: \"a\" common_name: \"y\" job: \"j\" }"),
              StartsWith("file:2:10: a second tenant 'a'"));
}

TEST(ParsePolicyTest, WhatATenantLacksIsToldAtTheTenant) {
  EXPECT_THAT(ErrorOf("\ntenant { common_name: \"x\" job: \"j\" }"), StartsWith("file:2:1: "));
  EXPECT_THAT(ErrorOf("\ntenant { name: \"a\" job: \"j\" }"),
              StartsWith("file:2:1: tenant 'a' has no certificates"));
  EXPECT_THAT(ErrorOf("tenant { name: \"a\" common_name: \"x\" }"),
              StartsWith("file:1:1: tenant 'a' has no jobs"));
}

TEST(ParsePolicyTest, TextWithoutATenantIsNoPolicy) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("at least one tenant"));
  EXPECT_THAT(ErrorOf("# nothing\n"), HasSubstr("at least one tenant"));
}

TEST(ParsePolicyTest, TextsThatCannotBeShownAreRefused) {
  EXPECT_THAT(ErrorOf("tenant { name: \"a\\n\" common_name: \"x\" job: \"j\" }"),
              StartsWith("file:1:10: "));
  EXPECT_THAT(ErrorOf("tenant { name: \"a\" common_name: \"x\\033\" job: \"j\" }"),
              HasSubstr("'x\\x1b'"));
}

}  // namespace
}  // namespace thalweg::parse_policy_test
