#include "kernels/launch/emulator.h"

#include <algorithm>
#include <numeric>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace thalweg {
namespace {

// Kernels keep their data in shared memory; sanitizers make frames larger.
constexpr size_t kStackBytes = size_t{128} << 10;

}  // namespace

Emulator& Emulator::Get() {
  static Emulator emulator;
  return emulator;
}

Emulator::~Emulator() {
#if defined(__SANITIZE_THREAD__)
  for (Fiber& fiber : fibers_) __tsan_destroy_fiber(fiber.tsan_fiber);
#endif
}

int Emulator::Run(uint32_t blocks, uint32_t threads, const std::function<void()>& start,
                  const std::function<void()>& body) {
  if (blocks > 0) CountLaunch();
  Prepare(threads);
  body_ = &body;
  blocks_ = blocks;
  for (uint32_t block : Order(blocks)) {
    block_ = block;
    start();
    StartThreads();
    if (!RunBlock()) return 1;
    if (access_log_ != nullptr) access_log_->EndBlock();
  }
  return 0;
}

void Emulator::Prepare(uint32_t threads) {
  threads_ = threads;
  if (fibers_.size() < threads) fibers_.resize(threads);
  for (Fiber& fiber : fibers_) {
    if (fiber.stack != nullptr) continue;
    fiber.stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
#if defined(__SANITIZE_THREAD__)
    fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
  }
  warps_.resize(threads / kWarpThreads);
  lane_order_ = Order(kWarpThreads);
  warp_order_ = Order(threads / kWarpThreads);
}

// Returns one of the orders: rising, falling, shuffled.
std::vector<uint32_t> Emulator::Order(uint32_t count) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  switch (random_() % 3) {
    case 0:
      break;
    case 1:
      std::reverse(order.begin(), order.end());
      break;
    default:
      std::shuffle(order.begin(), order.end(), random_);
  }
  return order;
}

void Emulator::StartThreads() {
  for (uint32_t thread = 0; thread < threads_; ++thread) {
    Fiber& fiber = fibers_[thread];
    ucontext_t& start = fiber.context.start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack.get();
    start.uc_stack.ss_size = kStackBytes;
    start.uc_link = nullptr;
    makecontext(&start, &Emulator::Entry, 0);
    fiber.context.started = false;
    fiber.state = State::kReady;
    fiber.exchanges = 0;
    fiber.fake_stack = nullptr;
  }
}

bool Emulator::RunBlock() {
  for (;;) {
    for (uint32_t warp : warp_order_) RunWarp(warp);
    const auto ends = fibers_.begin() + threads_;
    if (std::all_of(fibers_.begin(), ends,
                    [](const Fiber& fiber) { return fiber.state == State::kDone; })) {
      return true;
    }
    if (!ReleaseBlock()) {
      DescribeDeadlock();
      return false;
    }
  }
}

// Runs until all lanes have ended or wait for other warps.
void Emulator::RunWarp(uint32_t warp) {
  do {
    for (uint32_t lane : lane_order_) {
      const uint32_t thread = warp * kWarpThreads + lane;
      if (fibers_[thread].state == State::kReady) SwitchTo(thread);
    }
  } while (ReleaseWarp(warp));
}

bool Emulator::ReleaseWarp(uint32_t warp) {
  Fiber* const lanes = &fibers_[size_t{warp} * kWarpThreads];
  for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
    // Names are compared by address: each is one literal of EmulatedThread.
    if (lanes[lane].state != State::kInWarp || lanes[lane].waits_in != lanes[0].waits_in) {
      return false;
    }
  }
  for (uint32_t lane = 0; lane < kWarpThreads; ++lane) lanes[lane].state = State::kReady;
  return true;
}

bool Emulator::ReleaseBlock() {
  const auto begin = fibers_.begin();
  const auto end = begin + threads_;
  if (!std::all_of(begin, end, [](const Fiber& f) { return f.state == State::kAtBarrier; })) {
    return false;
  }
  std::for_each(begin, end, [](Fiber& fiber) { fiber.state = State::kReady; });
  return true;
}

void Emulator::SyncBlock() { Yield(State::kAtBarrier, "SyncBlock"); }

const uint64_t* Emulator::ExchangeInWarp(const char* name, uint64_t value) {
  const uint32_t place = fibers_[current_].exchanges++ % 2;
  Warp& warp = warps_[current_ / kWarpThreads];
  warp.values[place][current_ % kWarpThreads] = value;
  Yield(State::kInWarp, name);
  return warp.values[place];
}

void Emulator::DescribeDeadlock() {
  error_ = "block " + std::to_string(block_) + " of " + std::to_string(blocks_) +
           " cannot go on, because not all threads reach the same barrier or exchange:";
  const auto where = [this](uint32_t thread) -> std::string {
    const Fiber& fiber = fibers_[thread];
    return fiber.state == State::kDone ? "have returned" : std::string("wait in ") + fiber.waits_in;
  };
  for (uint32_t first = 0; first < threads_;) {
    uint32_t last = first;
    while (last + 1 < threads_ && where(last + 1) == where(first)) ++last;
    error_ += " threads " + std::to_string(first) + " to " + std::to_string(last) + " " +
              where(first) + ";";
    first = last + 1;
  }
  error_.back() = '.';
}

void Emulator::Switch(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // The sanitizers report jumps between stacks as errors.
  swapcontext(&from.start, &to.start);
#else
  // This is five times as fast as swapcontext(), which makes two system calls.
  from.started = true;
  if (_setjmp(from.jump) != 0) return;
  if (to.started) _longjmp(to.jump, 1);
  setcontext(&to.start);
#endif
}

// The sanitizers must be told of every switch; otherwise they confuse the stacks.

void Emulator::SwitchTo(uint32_t thread) {
  current_ = thread;
  Fiber& fiber = fibers_[thread];
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.get(), kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
  scheduler_tsan_fiber_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.tsan_fiber, 0);
#endif
  Switch(scheduler_, fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

void Emulator::Yield(State state, const char* waits_in) {
  const uint32_t thread = current_;
  Fiber& fiber = fibers_[thread];
  fiber.state = state;
  fiber.waits_in = waits_in;
#if defined(__SANITIZE_ADDRESS__)
  // Without a place to keep it, the fake stack of an ended thread is freed.
  __sanitizer_start_switch_fiber(state == State::kDone ? nullptr : &fiber.fake_stack,
                                 scheduler_stack_, scheduler_stack_bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(scheduler_tsan_fiber_, 0);
#endif
  Switch(fiber.context, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
}

void Emulator::Entry() {
  Emulator& emulator = Get();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &emulator.scheduler_stack_,
                                  &emulator.scheduler_stack_bytes_);
#endif
  (*emulator.body_)();
  emulator.Yield(State::kDone, "");
}

}  // namespace thalweg
