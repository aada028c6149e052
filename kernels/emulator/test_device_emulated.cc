#include <new>

#include "kernels/launch/test_device.h"

namespace thalweg {

absl::Status CheckDevice() { return absl::OkStatus(); }

absl::Status FinishDevice() { return absl::OkStatus(); }

// The allocation ends with the content, so that AddressSanitizer sees an access one byte beyond it.
DeviceBuffer::DeviceBuffer(size_t bytes, size_t misalignment)
    : memory_(static_cast<std::byte*>(::operator new(bytes + misalignment, std::align_val_t(256)))),
      misalignment_(misalignment),
      bytes_(bytes) {}

DeviceBuffer::~DeviceBuffer() { ::operator delete(memory_, std::align_val_t(256)); }

void DeviceBuffer::Fill(const std::vector<std::byte>& content) {
  ASSERT_EQ(content.size(), bytes_);
  if (bytes_ > 0) std::memcpy(Data(), content.data(), bytes_);
}

std::vector<std::byte> DeviceBuffer::Content() const { return {Data(), Data() + bytes_}; }

}  // namespace thalweg
