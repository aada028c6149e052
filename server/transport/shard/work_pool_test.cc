#include "server/transport/shard/work_pool.h"

#include <gtest/gtest.h>

#include "server/transport/guard/fair_semaphore.h"
#include "server/transport/testing/recorder.h"

namespace thalweg::work_pool_test {
namespace {

TEST(WorkPoolTest, WorkBeyondTheBoundIsRefusedAndTheRestIsDone) {
  Recorder<int> done;
  Recorder<bool> begun;
  Recorder<bool> release;
  {
    WorkPool pool(1, 2);
    ASSERT_TRUE(pool.TryRun([&] {
      begun.Add(true);
      release.WaitFor(1);
      done.Add(0);
    }));
    begun.WaitFor(1);
    EXPECT_TRUE(pool.TryRun([&] { done.Add(1); }));
    EXPECT_TRUE(pool.TryRun([&] { done.Add(2); }));
    EXPECT_FALSE(pool.TryRun([&] { done.Add(3); }));
    release.Add(true);
  }
  EXPECT_EQ(done.Get(), (std::vector<int>{0, 1, 2}));
}

TEST(PlacesTest, PlaceIsFreeAgainWhenNobodyHasIt) {
  // Callers of this process share nothing with others.
  FairSemaphore places(2);
  const std::shared_ptr<void> first = places.Take("");
  std::shared_ptr<void> second = places.Take("");
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(places.Take(""), nullptr);
  second = nullptr;
  EXPECT_NE(places.Take(""), nullptr);
}

}  // namespace
}  // namespace thalweg::work_pool_test
