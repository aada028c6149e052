#include "kernels/launch/emulator.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/launch/launch.h"
#include "kernels/launch/status.h"

namespace thalweg::emulator_test {
namespace {

using ::testing::HasSubstr;

constexpr int kLaunches = 30;  // enough for all orders

template <class Derived>
struct KernelOf64 {
  static constexpr uint32_t kThreads = 64;
  struct Shared {
    uint32_t values[kThreads];
  };
  struct Args {
    uint32_t* out;
  };
};

struct Index : KernelOf64<Index> {
  template <class Thread>
  static void Run(const Thread& thread, Shared&, const Args& args) {
    args.out[thread.Block() * kThreads + thread.Index()] =
        thread.Block() * 1000 + thread.Warp() * 100 + thread.Lane() + 10000 * thread.Blocks();
  }
};

TEST(EmulatorTest, EveryThreadOfEveryBlockRunsOnce) {
  for (int launch = 0; launch < kLaunches; ++launch) {
    std::vector<uint32_t> out(3 * 64);
    ASSERT_EQ(Launch<Index>(nullptr, 3, {out.data()}), 0);
    for (uint32_t i = 0; i < out.size(); ++i) {
      EXPECT_EQ(out[i], 30000 + i / 64 * 1000 + i % 64 / 32 * 100 + i % 32);
    }
  }
}

template <bool kBarrier>
struct Reverse : KernelOf64<Reverse<kBarrier>> {
  using Base = KernelOf64<Reverse<kBarrier>>;
  template <class Thread>
  static void Run(const Thread& thread, typename Base::Shared& shared,
                  const typename Base::Args& args) {
    shared.values[thread.Index()] = thread.Index();
    if (kBarrier) thread.SyncBlock();
    args.out[thread.Index()] = shared.values[63 - thread.Index()];
  }
};

template <class Kernel>
int WrongLaunches() {
  int wrong = 0;
  for (int launch = 0; launch < kLaunches; ++launch) {
    std::vector<uint32_t> out(64);
    EXPECT_EQ(Launch<Kernel>(nullptr, 1, {out.data()}), 0);
    for (uint32_t i = 0; i < 64; ++i) {
      if (out[i] == 63 - i) continue;
      ++wrong;
      break;
    }
  }
  return wrong;
}

TEST(EmulatorTest, BarriersOrderTheThreadsOfABlockAndMissingOnesShow) {
  EXPECT_EQ(WrongLaunches<Reverse<true>>(), 0);
  EXPECT_EQ(WrongLaunches<Reverse<false>>(), kLaunches);
}

// This kernel works only where the lanes of a warp happen to run in rising order.
struct NeedsWarpBarrier : KernelOf64<NeedsWarpBarrier> {
  template <class Thread>
  static void Run(const Thread& thread, Shared& shared, const Args& args) {
    shared.values[thread.Index()] = 63 - thread.Index();
    args.out[thread.Index()] =
        63 - thread.Index() +
        (thread.Lane() > 0 && shared.values[thread.Index() - 1] != 64 - thread.Index() ? 1 : 0);
  }
};

TEST(EmulatorTest, LanesRunInSeveralOrders) {
  const int wrong = WrongLaunches<NeedsWarpBarrier>();
  EXPECT_GT(wrong, 0);
  EXPECT_LT(wrong, kLaunches);
}

struct Exchange : KernelOf64<Exchange> {
  template <class Thread>
  static void Run(const Thread& thread, Shared&, const Args& args) {
    const uint32_t lane = thread.Lane();
    uint32_t right = 0;
    right += thread.Shuffle(lane, 5) == 5 ? 1 : 0;
    right += thread.ShuffleUp(lane, 1) == (lane == 0 ? 0 : lane - 1) ? 1 : 0;
    right += thread.ShuffleDown(lane, 3) == (lane > 28 ? lane : lane + 3) ? 1 : 0;
    right += thread.ShuffleXor(lane, 16) == (lane ^ 16) ? 1 : 0;
    right += thread.ShuffleXor(1.5 * lane, 1) == 1.5 * (lane ^ 1) ? 1 : 0;
    right += thread.Ballot(lane % 2 == 1) == 0xaaaaaaaa ? 1 : 0;
    thread.SyncWarp();
    thread.Add(args.out, right);
  }
};

TEST(EmulatorTest, LanesExchangeValues) {
  for (int launch = 0; launch < kLaunches; ++launch) {
    uint32_t right = 0;
    ASSERT_EQ(Launch<Exchange>(nullptr, 2, {&right}), 0);
    EXPECT_EQ(right, 2 * 64 * 6u);
  }
}

struct ReadsGarbage : KernelOf64<ReadsGarbage> {
  template <class Thread>
  static void Run(const Thread& thread, Shared& shared, const Args& args) {
    args.out[thread.Index()] = shared.values[thread.Index()];
    shared.values[thread.Index()] = 0;
  }
};

TEST(EmulatorTest, SharedMemoryIsGarbageInEveryBlock) {
  std::vector<uint32_t> out(64);
  ASSERT_EQ(Launch<ReadsGarbage>(nullptr, 2, {out.data()}), 0);
  EXPECT_EQ(out, std::vector<uint32_t>(64, 0xa5a5a5a5));
}

struct MissesBlockBarrier : KernelOf64<MissesBlockBarrier> {
  template <class Thread>
  static void Run(const Thread& thread, Shared&, const Args& args) {
    if (thread.Index() < 40) thread.SyncBlock();
  }
};
struct MixesExchanges : KernelOf64<MixesExchanges> {
  template <class Thread>
  static void Run(const Thread& thread, Shared&, const Args& args) {
    if (thread.Index() == 7) {
      thread.Ballot(true);
    } else {
      thread.SyncWarp();
    }
  }
};

TEST(EmulatorTest, ThreadsThatWaitForOthersThatNeverComeAreAnError) {
  for (int launch = 0; launch < kLaunches; ++launch) {
    const absl::Status missed =
        LaunchStatus(Launch<MissesBlockBarrier>(nullptr, 5, {nullptr}), "a test");
    EXPECT_TRUE(absl::IsInternal(missed));
    EXPECT_THAT(std::string(missed.message()),
                HasSubstr("threads 0 to 39 wait in SyncBlock; threads 40 to 63 have returned."));
    const absl::Status mixed =
        LaunchStatus(Launch<MixesExchanges>(nullptr, 1, {nullptr}), "a test");
    EXPECT_THAT(std::string(mixed.message()), HasSubstr("threads 7 to 7 wait in Ballot"));
  }
  EXPECT_EQ(WrongLaunches<Reverse<true>>(), 0) << "the emulator works again afterwards";
}

}  // namespace
}  // namespace thalweg::emulator_test
