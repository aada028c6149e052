// The GPU, or the emulator in its place, as tests and benchmarks of the CUDA kernels see it: which
// of the two is a matter of what they are linked with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace thalweg {

// OK when kernels can run; else why not.
absl::Status CheckDevice();

// Waits for everything that has been launched. Returns what has gone wrong in it.
absl::Status FinishDevice();

// Device memory that begins `misalignment` bytes after a multiple of 256. One thread; fails the
// test when there is not enough. Copies wait for what has been launched.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes, size_t misalignment = 0);
  DeviceBuffer(const std::vector<std::byte>& content, size_t misalignment)
      : DeviceBuffer(content.size(), misalignment) {
    Fill(content);
  }
  template <class T>
  explicit DeviceBuffer(const std::vector<T>& content, size_t misalignment = 0)
      : DeviceBuffer(content.size() * sizeof(T), misalignment) {
    std::vector<std::byte> bytes(content.size() * sizeof(T));
    if (!bytes.empty()) std::memcpy(bytes.data(), content.data(), bytes.size());
    Fill(bytes);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        misalignment_(other.misalignment_),
        bytes_(other.bytes_) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  ~DeviceBuffer();

  std::byte* Data() const { return memory_ + misalignment_; }
  std::span<std::byte> Span() const { return {Data(), bytes_}; }
  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(Data());
  }

  // Requires as many bytes as the buffer has.
  void Fill(const std::vector<std::byte>& content);
  std::vector<std::byte> Content() const;
  template <class T>
  std::vector<T> ContentAs() const {
    const std::vector<std::byte> bytes = Content();
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }

 private:
  std::byte* memory_ = nullptr;
  size_t misalignment_ = 0;
  size_t bytes_ = 0;
};

// Tests of it are skipped where no GPU is.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::Status status = CheckDevice();
    if (!status.ok()) GTEST_SKIP() << status.message();
  }
};

}  // namespace thalweg
