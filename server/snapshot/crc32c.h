// Crc32c is the checksum of snapshots' records: the Castagnoli polynomial, as in iSCSI (RFC 3720).
#pragma once

#include <cstdint>
#include <string_view>

namespace thalweg {

uint32_t Crc32c(std::string_view bytes);

}  // namespace thalweg
