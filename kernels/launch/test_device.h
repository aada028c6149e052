// This header gives tests and benchmarks of the CUDA kernels a GPU, or the emulator; the linked
// library decides which.
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

// Returns OK when kernels can run; else why not.
absl::Status CheckDevice();

// Waits for everything that has been launched; returns its error, if any.
absl::Status FinishDevice();

// A DeviceBuffer is device memory that begins `misalignment` bytes after a multiple of 256. Only
// one thread may use it; it fails the test when there is not enough memory. Copies wait for earlier
// launches.
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

// Tests with this fixture are skipped where there is no GPU.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::Status status = CheckDevice();
    if (!status.ok()) GTEST_SKIP() << status.message();
  }
};

}  // namespace thalweg
