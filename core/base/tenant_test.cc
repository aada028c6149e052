#include "core/base/tenant.h"

#include <gtest/gtest.h>

namespace thalweg::tenant_test {
namespace {

TEST(PatternTest, StarStandsForAnyTextAtOneEnd) {
  EXPECT_TRUE(MatchesPattern("team-a-*", "team-a-1"));
  EXPECT_TRUE(MatchesPattern("team-a-*", "team-a-"));
  EXPECT_FALSE(MatchesPattern("team-a-*", "team-a"));
  EXPECT_FALSE(MatchesPattern("team-a-*", "xteam-a-1"));
  EXPECT_TRUE(MatchesPattern("*.example", "a.b.example"));
  EXPECT_FALSE(MatchesPattern("*.example", "example"));
  EXPECT_FALSE(MatchesPattern("*.example", "a.example.org"));
  EXPECT_TRUE(MatchesPattern("*", ""));
  EXPECT_TRUE(MatchesPattern("job", "job"));
  EXPECT_FALSE(MatchesPattern("job", "job1"));
  EXPECT_FALSE(MatchesPattern("job", "Job"));
}

TEST(PatternTest, OneStarAtOneEndIsAPattern) {
  for (const char* good : {"a", "a*", "*a", "*"}) EXPECT_TRUE(IsPattern(good)) << good;
  for (const char* bad : {"", "a*b", "*a*", "**"}) EXPECT_FALSE(IsPattern(bad)) << bad;
}

TEST(PeerNamesTest, PrincipalIsTheFirstNameOfTheMostTelling) {
  EXPECT_EQ((PeerNames{"spiffe://c/a", {"a", "b"}, "n"}).Principal(), "spiffe://c/a");
  EXPECT_EQ((PeerNames{"", {"a", "b"}, "n"}).Principal(), "DNS:a");
  EXPECT_EQ((PeerNames{"", {}, "n"}).Principal(), "CN=n");
  EXPECT_EQ(PeerNames{}.Principal(), "");
}

TEST(TenantTest, NameOfOneKindIsNoNameOfAnother) {
  const Tenant spiffe{.name = "a", .spiffe_ids = {"spiffe://c/a"}};
  EXPECT_TRUE(spiffe.Holds({"spiffe://c/a", {}, ""}));
  EXPECT_FALSE(spiffe.Holds({"", {"spiffe://c/a"}, "spiffe://c/a"}));
  const Tenant dns{.name = "a", .dns_names = {"*.a.example"}};
  EXPECT_TRUE(dns.Holds({"", {"x", "n1.A.example"}, ""}));
  EXPECT_FALSE(dns.Holds({"", {"x"}, "n1.a.example"}));
  const Tenant common{.name = "a", .common_names = {"n1"}};
  EXPECT_TRUE(common.Holds({"", {}, "n1"}));
  EXPECT_FALSE(common.Holds({"", {"n1"}, ""}));
}

TEST(TenantTest, CertificateWithoutNamesIsNobodys) {
  const Tenant all{.name = "a", .spiffe_ids = {"*"}, .dns_names = {"*"}, .common_names = {"*"}};
  EXPECT_FALSE(all.Holds({}));
  EXPECT_TRUE(all.Holds({"", {}, "x"}));
}

TEST(PolicyTest, FirstTenantThatHoldsTheCertificateCounts) {
  const Policy policy{{{.name = "one", .common_names = {"node-1"}, .jobs = {"one"}},
                       {.name = "rest", .common_names = {"node-*"}, .jobs = {"rest-*"}}}};
  EXPECT_EQ(policy.Find({"", {}, "node-1"})->name, "one");
  EXPECT_EQ(policy.Find({"", {}, "node-2"})->name, "rest");
  EXPECT_EQ(policy.Find({"", {}, "other"}), nullptr);
  EXPECT_TRUE(policy.tenants[1].MayJoin("rest-1"));
  EXPECT_FALSE(policy.tenants[1].MayJoin("one"));
}

}  // namespace
}  // namespace thalweg::tenant_test
