#include "server/round/chunk_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace thalweg::chunk_set_test {
namespace {

TEST(ChunkSetTest, ChunksInWhateverOrderAreOneRunInTheEnd) {
  std::vector<uint32_t> order(1000);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(1);
  for (int i = 0; i < 10; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    ChunkSet set;
    std::set<uint32_t> expected;
    for (const uint32_t chunk : order) {
      set.Add(chunk);
      set.Add(chunk);
      expected.insert(chunk);
      const uint32_t other = static_cast<uint32_t>(random()) % 1000;
      ASSERT_EQ(set.Contains(other), expected.contains(other));
    }
    EXPECT_EQ(set.runs(), 1u);
    EXPECT_FALSE(set.Contains(1000));
  }
}

TEST(ChunkSetTest, RunsAreCountedUpToTheLargestNumber) {
  constexpr uint32_t kLast = std::numeric_limits<uint32_t>::max();
  ChunkSet set;
  for (const uint32_t chunk : {kLast, 0u, kLast - 2, 2u}) set.Add(chunk);
  EXPECT_EQ(set.runs(), 4u);
  set.Add(1);
  set.Add(kLast - 1);
  EXPECT_EQ(set.runs(), 2u);
  for (const uint32_t chunk : {0u, 1u, 2u, kLast - 2, kLast - 1, kLast}) {
    EXPECT_TRUE(set.Contains(chunk));
  }
  EXPECT_FALSE(set.Contains(3));
}

}  // namespace
}  // namespace thalweg::chunk_set_test
