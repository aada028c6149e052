#include "server/sidecar/collective/arenas.h"

#include <gtest/gtest.h>

#include <utility>

namespace thalweg::arenas_test {
namespace {

TEST(ArenasTest, ResultThatWasReturnedIsTakenAgainForOneOfItsSize) {
  Arenas arenas;
  auto first = arenas.Take(ipc::kMaxInlineBytes + 1);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GT((*first)->arena.payload_bytes(), ipc::kMaxInlineBytes);
  const uint32_t number = (*first)->number;
  EXPECT_NE((*arenas.Take(ipc::kMaxInlineBytes + 1))->number, number) << "it is in use";
  arenas.Return(*std::move(first));
  EXPECT_NE((*arenas.Take(4 * ipc::kMaxInlineBytes))->number, number) << "another size";
  EXPECT_EQ((*arenas.Take(ipc::kMaxInlineBytes + 2))->number, number);
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
