// Emulator runs the threads of a block on one processor thread, each on a stack of its own, and
// switches where they wait for each other. The order of threads, warps and blocks changes from
// launch to launch (rising, falling, shuffled), the same way in every process: code that lacks a
// barrier gives wrong results in some order. A warp runs as far ahead of the others as it can.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/launch/access_log.h"

namespace thalweg {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr int kGarbage = 0xa5;

// Only one thread may use an Emulator.
class Emulator {
 public:
  static Emulator& Get();
  Emulator() = default;
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;
  ~Emulator();

  // Runs `start` before each block and `body` in each of its threads. Returns 0, or 1 when threads
  // wait for others that never come; error() then says which thread waits where, and no further
  // block runs.
  int Run(uint32_t blocks, uint32_t threads, const std::function<void()>& start,
          const std::function<void()>& body);
  const std::string& error() const { return error_; }

  // Returns how many kernels, fills and copies there were.
  uint64_t launches() const { return launches_; }
  void CountLaunch() { ++launches_; }

  // Wide accesses are noted in `log` from now on; null: in none.
  void SetAccessLog(AccessLog* log) { access_log_ = log; }

  // These are for the body: they say which thread of which block runs, and let threads wait.
  uint32_t thread() const { return current_; }
  uint32_t block() const { return block_; }
  uint32_t blocks() const { return blocks_; }
  void SyncBlock();
  void NoteAccess(const void* at, uint32_t bytes, bool writes) {
    if (access_log_ != nullptr) access_log_->Note(current_, at, bytes, writes);
  }
  // Returns the `value` of each of the 32 lanes, once all of them have called it with equal `name`.
  // Valid until the lane's next call.
  const uint64_t* ExchangeInWarp(const char* name, uint64_t value);

 private:
  enum class State { kReady, kAtBarrier, kInWarp, kDone };
  struct Context {
    ucontext_t start;
    jmp_buf jump;
    bool started = false;
  };
  struct Fiber {
    std::unique_ptr<std::byte[]> stack;
    Context context;
    State state = State::kDone;
    const char* waits_in = "";
    // Lanes differ by one call at most, so two places for values are enough.
    uint32_t exchanges = 0;
    void* fake_stack = nullptr;  // for AddressSanitizer
    void* tsan_fiber = nullptr;
  };
  struct Warp {
    uint64_t values[2][kWarpThreads];
  };

  static void Entry();
  void Prepare(uint32_t threads);
  void StartThreads();
  bool RunBlock();
  void RunWarp(uint32_t warp);
  bool ReleaseWarp(uint32_t warp);
  bool ReleaseBlock();
  static void Switch(Context& from, Context& to);
  void SwitchTo(uint32_t thread);
  void Yield(State state, const char* waits_in);
  void DescribeDeadlock();
  std::vector<uint32_t> Order(uint32_t count);

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  uint32_t threads_ = 0;  // of a block
  uint32_t blocks_ = 0;
  uint32_t block_ = 0;
  uint32_t current_ = 0;
  const std::function<void()>* body_ = nullptr;
  std::string error_;
  uint64_t launches_ = 0;
  AccessLog* access_log_ = nullptr;
  // These are this launch's orders of blocks, warps and lanes.
  std::vector<uint32_t> warp_order_;
  std::vector<uint32_t> lane_order_;
  std::mt19937 random_;
  Context scheduler_;
  // The sanitizers need these; they are unused without one.
  [[maybe_unused]] const void* scheduler_stack_ = nullptr;
  [[maybe_unused]] size_t scheduler_stack_bytes_ = 0;
  [[maybe_unused]] void* scheduler_tsan_fiber_ = nullptr;
};

}  // namespace thalweg
