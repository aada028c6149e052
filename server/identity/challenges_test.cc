#include "server/identity/challenges.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace thalweg::challenges_test {
namespace {

using std::chrono::nanoseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr Duration kLifetime = seconds(30);
constexpr TimePoint kStart{std::chrono::hours(1)};

void ExpectRefused(const absl::Status& status, const std::string& why) {
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(why));
}

TEST(ChallengesTest, ChallengeIsSpentOnce) {
  Challenges challenges(kLifetime);
  const std::string first = challenges.Draw(kStart);
  const std::string second = challenges.Draw(kStart);
  EXPECT_NE(first, second);
  EXPECT_EQ(first.size(), Challenges::kBytes);
  EXPECT_TRUE(challenges.Spend(second, kStart).ok());
  EXPECT_TRUE(challenges.Spend(first, kStart).ok());
  for (const auto& challenge : {first, second}) {
    ExpectRefused(challenges.Spend(challenge, kStart), "used before");
  }
}

TEST(ChallengesTest, ChallengeLivesForItsLifetime) {
  Challenges challenges(kLifetime);
  const std::string first = challenges.Draw(kStart);
  const std::string second = challenges.Draw(kStart);
  EXPECT_TRUE(challenges.Spend(first, kStart + kLifetime - nanoseconds(1)).ok());
  ExpectRefused(challenges.Spend(first, kStart + kLifetime - nanoseconds(1)), "used before");
  ExpectRefused(challenges.Spend(second, kStart + kLifetime), "expired");
  ExpectRefused(challenges.Spend(first, kStart + kLifetime), "expired");
}

TEST(ChallengesTest, ForgedAndForeignChallengesAreRefusedAndSpendNothing) {
  Challenges challenges(kLifetime);
  Challenges others(kLifetime);
  const std::string genuine = challenges.Draw(kStart);
  for (size_t i = 0; i < genuine.size(); ++i) {
    std::string forged = genuine;
    forged[i] ^= 1;
    ExpectRefused(challenges.Spend(forged, kStart), "not one of this server's");
  }
  for (size_t size = 0; size < genuine.size(); ++size) {
    ExpectRefused(challenges.Spend(genuine.substr(0, size), kStart), "not one of this server's");
  }
  ExpectRefused(challenges.Spend(genuine + '\0', kStart), "not one of this server's");
  ExpectRefused(challenges.Spend(others.Draw(kStart), kStart), "not one of this server's");
  EXPECT_TRUE(challenges.Spend(genuine, kStart).ok());
}

TEST(ChallengesTest, FloodDisplacesNobodysChallenge) {
  Challenges challenges(kLifetime);
  const std::string early = challenges.Draw(kStart);
  for (size_t i = 0; i < 2 * Challenges::kMaxSpent; ++i) {
    const std::string drawn = challenges.Draw(kStart + nanoseconds(i));
    if (i % 2 == 1) continue;
    ASSERT_TRUE(challenges.Spend(drawn, kStart + nanoseconds(i)).ok());
  }
  EXPECT_TRUE(challenges.Spend(early, kStart + seconds(29)).ok());
}

}  // namespace
}  // namespace thalweg::challenges_test
