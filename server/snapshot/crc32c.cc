#include "server/snapshot/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace thalweg {
namespace {

constexpr size_t kStride = 8;  // bytes that are looked up at once
using Tables = std::array<std::array<uint32_t, 256>, kStride>;

// tables[i][b] is the checksum of byte b with i zeros after it, without the final complement.
constexpr Tables MakeTables() {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    tables[0][byte] = crc;
  }
  for (size_t i = 1; i < kStride; ++i) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[i - 1][byte];
      tables[i][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

}  // namespace

uint32_t Crc32c(std::string_view bytes) {
  static_assert(std::endian::native == std::endian::little);
  uint32_t crc = ~uint32_t{0};
  for (; bytes.size() >= kStride; bytes.remove_prefix(kStride)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), kStride);
    word ^= crc;
    crc = 0;
    for (size_t i = 0; i < kStride; ++i) crc ^= kTables[kStride - 1 - i][(word >> (8 * i)) & 0xff];
  }
  for (const char byte : bytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return ~crc;
}

}  // namespace thalweg
