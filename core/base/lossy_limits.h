// The numbers of the lossy wire formats that are compiled for GPUs as well; part of
// core/base/wire_format.h.
#pragma once

#include <cstdint>

namespace thalweg {

// Elements that share a scale; the last block of a chunk may have fewer.
inline constexpr uint64_t kInt8BlockElems = 256;
inline constexpr uint64_t kOneBitBlockElems = 1024;

// Most elements of one chunk in a lossy format.
inline constexpr uint64_t kMaxLossyElems = 0xffffffff;

}  // namespace thalweg
