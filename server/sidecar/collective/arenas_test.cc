#include "server/sidecar/collective/arenas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <utility>
#include <vector>

namespace thalweg::arenas_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr TimePoint kNow{};

TEST(ArenasTest, ResultThatWasReturnedIsTakenAgainForOneOfItsSize) {
  Arenas arenas;
  auto first = arenas.Take(ipc::kMaxInlineBytes + 1);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GT((*first)->arena.payload_bytes(), ipc::kMaxInlineBytes);
  const uint32_t number = (*first)->number;
  EXPECT_NE((*arenas.Take(ipc::kMaxInlineBytes + 1))->number, number) << "it is in use";
  arenas.Return(*std::move(first), kNow);
  EXPECT_NE((*arenas.Take(4 * ipc::kMaxInlineBytes))->number, number) << "another size";
  EXPECT_EQ((*arenas.Take(ipc::kMaxInlineBytes + 2))->number, number);
}

TEST(ArenasTest, IdleArenaIsGivenUpAndWorkersThatKnowItGetAnEmptyOneInItsPlace) {
  Arenas arenas;
  std::vector<std::pair<uint32_t, uint32_t>> told;  // ranks and numbers
  const auto tell = [&told](uint32_t rank, const ipc::ShareArena& message, int fd) {
    EXPECT_TRUE(BucketArena::Open(UniqueFd(dup(fd)), message.bytes).ok());
    told.emplace_back(rank, message.number);
  };
  auto taken = *arenas.Take(ipc::kMaxInlineBytes + 1);
  const uint32_t number = taken->number;
  EXPECT_TRUE(arenas.IsNewTo(3, *taken));
  arenas.Return(std::move(taken), kNow);
  arenas.GiveUpIdle(kNow + kArenaIdleTime - std::chrono::seconds(1), tell);
  EXPECT_THAT(told, IsEmpty());
  arenas.GiveUpIdle(kNow + kArenaIdleTime, tell);
  EXPECT_THAT(told, ElementsAre(std::pair(3u, number)));
  taken = *arenas.Take(4 * ipc::kMaxInlineBytes);
  EXPECT_EQ(taken->number, number) << "numbers are used again";
  EXPECT_TRUE(arenas.IsNewTo(3, *taken));
  arenas.GiveUpIdle(kNow + kArenaIdleTime, tell);
  EXPECT_EQ(told.size(), 1u) << "what is in use is kept";
}

TEST(ArenasTest, SmallResultNeedsNoArena) {
  EXPECT_EQ(*Arenas().Take(ipc::kMaxInlineBytes), nullptr);
}

TEST(ArenasTest, ResultThatNoArenaCanHoldIsRefused) {
  for (const uint64_t bytes : {kMaxArenaPayloadBytes + 1, (uint64_t{1} << 63) + 1, UINT64_MAX}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Arenas().Take(bytes).status())) << bytes;
  }
}

}  // namespace
}  // namespace thalweg::arenas_test
