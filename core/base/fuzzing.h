// This header is for fuzz targets (x_fuzz.cc): functions that take any bytes and end the process if
// a promise is broken. Clang's libFuzzer calls them with bytes that it makes up, fuzz_main.cc
// with files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

namespace thalweg {

// Ends the process, with a message, unless the promise holds.
inline void Promise(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

// A FuzzInput takes the bytes apart; what is missing at its end is 0.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : bytes_(std::as_bytes(std::span(data, size))) {}

  uint8_t Byte() { return static_cast<uint8_t>(Number(1)); }
  uint16_t Short() { return static_cast<uint16_t>(Number(2)); }
  uint32_t Word() { return Number(4); }

  // Returns so many bytes, or those that are left.
  std::span<const std::byte> Take(size_t count) {
    const auto taken = bytes_.first(std::min(count, bytes_.size()));
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  std::string Text(size_t count) {
    const auto taken = Take(count);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::span<const std::byte> Rest() { return Take(bytes_.size()); }
  bool IsEmpty() const { return bytes_.empty(); }

 private:
  uint32_t Number(size_t bytes) {
    uint32_t number = 0;
    int shift = 0;
    for (const std::byte byte : Take(bytes)) {
      number |= std::to_integer<uint32_t>(byte) << shift;
      shift += 8;
    }
    return number;
  }

  std::span<const std::byte> bytes_;
};

}  // namespace thalweg

// The target. libFuzzer wants this name, and 0.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
