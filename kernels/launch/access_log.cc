#include "kernels/launch/access_log.h"

#include <algorithm>
#include <cassert>
#include <map>

#include "kernels/launch/emulator.h"

namespace thalweg {
namespace {

constexpr uint32_t kSectorBytes = 32;
constexpr uint32_t kWhole = 0xffffffffu;  // a bit for each byte

}  // namespace

void AccessLog::Note(uint32_t thread, const void* at, uint32_t bytes, bool writes) {
  if (of_threads_.size() <= thread) of_threads_.resize(thread + 1);
  of_threads_[thread].push_back({reinterpret_cast<uintptr_t>(at), bytes, writes});
}

void AccessLog::EndBlock() {
  for (size_t warp = 0; warp * kWarpThreads < of_threads_.size(); ++warp) CountWarp(warp);
  of_threads_.clear();
}

void AccessLog::CountWarp(size_t warp) {
  const auto first = of_threads_.begin() + static_cast<ptrdiff_t>(warp * kWarpThreads);
  const auto last = first + std::min<ptrdiff_t>(kWarpThreads, of_threads_.end() - first);
  size_t instructions = 0;
  for (auto lane = first; lane != last; ++lane) {
    instructions = std::max(instructions, lane->size());
  }
  for (size_t n = 0; n < instructions; ++n) {
    std::map<uintptr_t, uint32_t> read;
    std::map<uintptr_t, uint32_t> written;
    for (auto lane = first; lane != last; ++lane) {
      if (n >= lane->size()) continue;
      const Access& access = (*lane)[n];
      assert(access.at / kSectorBytes == (access.at + access.bytes - 1) / kSectorBytes);
      const uint32_t bytes = ((1u << access.bytes) - 1) << (access.at % kSectorBytes);
      (access.writes ? written : read)[access.at / kSectorBytes] |= bytes;
    }
    sectors_.read += read.size();
    sectors_.written += written.size();
    for (const auto& [sector, bytes] : written) sectors_.written_in_part += bytes != kWhole;
  }
}

}  // namespace thalweg
