#include "kernels/launch/emulated_streams.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "kernels/launch/emulator.h"

namespace thalweg {
namespace {

EmulatedQueue& Queue() {
  static auto* const queue = new EmulatedQueue();
  return *queue;
}

void RunOrDie(const std::function<LaunchError()>& work) {
  static std::mutex one_at_a_time;  // the emulator requires it, and streams are threads
  const std::lock_guard lock(one_at_a_time);
  if (work() == 0) return;
  std::fprintf(stderr, "emulated launch: %s\n", Emulator::Get().error().c_str());
  std::abort();
}

}  // namespace

void SetEmulatedQueue(EmulatedQueue queue) { Queue() = std::move(queue); }

LaunchError RunOnStream(CudaStream stream, std::function<LaunchError()> work) {
  if (Queue() == nullptr) return work();
  Queue()(stream, [work = std::move(work)] { RunOrDie(work); });
  return 0;
}

}  // namespace thalweg
