#include "server/round/chunk_states.h"

#include <gtest/gtest.h>

namespace thalweg::chunk_states_test {
namespace {

TEST(ChunkStatesTest, ChunksOfPartsHaveResidualsOfTheirOwnFromFirstUseOn) {
  ChunkStates store;
  EXPECT_EQ(store.Find({0, 0, 1}, 0), nullptr);
  const auto residual = store.Get({0, 0, 1}, 0, 10);
  EXPECT_EQ(store.Get({0, 0, 1}, 0, 10), residual);
  EXPECT_EQ(store.Find({0, 0, 1}, 0), residual);
  EXPECT_NE(store.Get({0, 0, 1}, 1, 10), residual);
  EXPECT_NE(store.Get({0, 0, 4}, 0, 10), residual);
  EXPECT_NE(store.Get({1, 0, 1}, 0, 10), residual);
  EXPECT_EQ(store.bytes(), 4 * 10 * sizeof(float));
}

TEST(ChunkStatesTest, NewLayoutDropsAllPartsOfTheBucketsEarlierOnes) {
  ChunkStates store;
  store.Get({3, 0, 1}, 0, 10);
  store.Get({3, 1, 4}, 7, 10);
  store.Get({3, 2, 1}, 0, 10);
  store.Get({2, 0, 1}, 0, 10);
  store.Get({4, 0, 1}, 0, 10);
  store.DropOlderLayouts({3, 2, 5});
  EXPECT_EQ(store.Find({3, 0, 1}, 0), nullptr);
  EXPECT_EQ(store.Find({3, 1, 4}, 7), nullptr);
  EXPECT_NE(store.Find({3, 2, 1}, 0), nullptr);
  EXPECT_NE(store.Find({2, 0, 1}, 0), nullptr);
  EXPECT_NE(store.Find({4, 0, 1}, 0), nullptr);
  EXPECT_EQ(store.bytes(), 3 * 10 * sizeof(float));
}

TEST(ChunkStatesTest, ResidualInUseOutlivesItsLayout) {
  ChunkStates store;
  const auto residual = store.Get({3, 0, 1}, 0, 10);
  store.DropOlderLayouts({3, 1, 0});
  EXPECT_EQ(residual->elems, 10u);
  EXPECT_NE(store.Get({3, 0, 1}, 0, 10), residual);
}

TEST(ChunkStatesTest, SnapshotGetsTheWeightsAsTheyWereHoweverOftenTheyHaveChangedSince) {
  const Weights before{{1, 2}, {{{3, 4}, {}}}, 7};
  ChunkState state(2);
  const auto set = [&state](const Weights& weights) {
    MutexLock lock(state.mutex);
    state.WeightsToChange() = weights;
  };
  set(before);
  state.WantWeights();
  set({{5, 6}, {}, 8});
  set({{7, 8}, {}, 9});
  EXPECT_EQ(state.FetchWanted(), before);
  state.WantWeights();
  EXPECT_EQ(state.FetchWanted(), (Weights{{7, 8}, {}, 9}));
  set({{9, 9}, {}, 10});  // nobody wants those before
  EXPECT_EQ(state.FetchWanted(), Weights());
}

TEST(ChunkStatesTest, OnlyFormatsThatLoseSomethingHaveResiduals) {
  EXPECT_TRUE(HasResidual(WireFormat::kInt8) && HasResidual(WireFormat::kOneBit));
  EXPECT_FALSE(HasResidual(WireFormat::kTopK));
  EXPECT_FALSE(HasResidual(WireFormat::kFloat16));
}

}  // namespace
}  // namespace thalweg::chunk_states_test
