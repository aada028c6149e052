#include "server/sidecar/codec/fold_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace thalweg::fold_pool_test {
namespace {

TEST(FoldPoolTest, EveryChunkIsWorkedOnOnceInEveryRun) {
  for (uint32_t threads : {1u, 2u, 5u}) {
    FoldPool pool(threads);
    for (uint32_t count : {0u, 1u, 3u, 1000u}) {
      std::vector<std::atomic<int>> times(count);
      const absl::Status status = pool.Run(count, [&](uint32_t chunk) {
        ++times[chunk];
        return absl::OkStatus();
      });
      ASSERT_TRUE(status.ok());
      for (const auto& n : times) ASSERT_EQ(n, 1) << threads << " threads, " << count << " chunks";
    }
  }
}

TEST(FoldPoolTest, FailureIsReturnedAndEndsTheRunButNotThePool) {
  FoldPool pool(3);
  std::atomic<uint32_t> begun{0};
  const absl::Status status = pool.Run(1'000'000, [&](uint32_t chunk) -> absl::Status {
    ++begun;
    return chunk < 10 ? absl::OkStatus() : absl::AbortedError("chunk is bad");
  });
  EXPECT_EQ(status.message(), "chunk is bad");
  // Ten calls succeed, and at most one per thread fails.
  EXPECT_LE(begun, 13u);
  EXPECT_TRUE(pool.Run(5, [](uint32_t) { return absl::OkStatus(); }).ok());
}

}  // namespace
}  // namespace thalweg::fold_pool_test
