// This header counts what the wide reads and writes of emulated kernels (pack.h) cost a GPU's
// memory: it moves whole sectors, for all lanes of a warp together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace thalweg {

struct Sectors {
  uint64_t read = 0;
  uint64_t written = 0;
  uint64_t written_in_part = 0;  // of those: by an instruction that writes not all of their bytes
};

// Number n of a lane's accesses is taken for part of the same instruction as number n of its
// neighbours', which is so where all lanes of a warp take the same branches. Only one thread may
// use a log.
class AccessLog {
 public:
  void Note(uint32_t thread, const void* at, uint32_t bytes, bool writes);
  // A block has ended; the next one begins.
  void EndBlock();
  const Sectors& sectors() const { return sectors_; }

 private:
  struct Access {
    uintptr_t at;
    uint32_t bytes;
    bool writes;
  };

  void CountWarp(size_t warp);

  std::vector<std::vector<Access>> of_threads_;
  Sectors sectors_;
};

}  // namespace thalweg
