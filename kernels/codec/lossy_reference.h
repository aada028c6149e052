// The lossy formats as docs/codecs.md defines them, an element at a time: what tests compare with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/codec/lossy_test_util.h"

namespace thalweg {

struct ReferenceChunk {
  Bytes bytes;
  Floats decoded;
};

inline void AppendFloat(float value, Bytes* bytes) {
  bytes->resize(bytes->size() + 4);
  std::memcpy(&(*bytes)[bytes->size() - 4], &value, 4);
}

inline float ReferenceDecodeInt8(int code, float scale) {
  if (!std::isfinite(scale) || code == -128 || code == 127 || code == -127) return kNaN;
  if (code == 126 || code == -126) return code > 0 ? kInfinity : -kInfinity;
  return static_cast<float>(code) * scale;
}

// The product of two floats is exact in double.
inline ReferenceChunk ReferenceInt8(const Floats& x) {
  ReferenceChunk result;
  for (size_t begin = 0; begin < x.size(); begin += 256) {
    const size_t end = std::min(x.size(), begin + 256);
    float largest = 0;
    for (size_t i = begin; i < end; ++i) {
      if (std::isfinite(x[i])) largest = std::max(largest, std::fabs(x[i]));
    }
    float scale = largest / 125;
    if (scale < std::numeric_limits<float>::min()) scale = 0;
    AppendFloat(scale, &result.bytes);
    for (size_t i = begin; i < end; ++i) {
      int code = 0;
      if (std::isnan(x[i])) {
        code = -128;
      } else if (std::isinf(x[i])) {
        code = x[i] > 0 ? 126 : -126;
      } else if (scale > 0) {
        code = static_cast<int>(std::nearbyint(double{x[i]} * double{1 / scale}));
      }
      result.bytes.push_back(static_cast<std::byte>(code));
      result.decoded.push_back(ReferenceDecodeInt8(code, scale));
    }
  }
  return result;
}

// Sixteen sums, then their sum by halves.
inline float ReferenceOneBitScale(const float* x, size_t elems) {
  float sums[16] = {};
  for (size_t i = 0; i < elems; ++i) {
    sums[i % 16] = std::fma(std::fabs(x[i]), 1.0f / 2048, sums[i % 16]);
  }
  for (int half : {8, 4, 2, 1}) {
    for (int j = 0; j < half; ++j) sums[j] = sums[j] + sums[j + half];
  }
  if (!std::isfinite(sums[0])) return kNaN;
  return std::fmin(sums[0] / (static_cast<float>(elems) / 2048), std::numeric_limits<float>::max());
}

inline ReferenceChunk ReferenceOneBit(const Floats& x) {
  ReferenceChunk result;
  for (size_t begin = 0; begin < x.size(); begin += 1024) {
    const size_t elems = std::min<size_t>(x.size() - begin, 1024);
    const float scale = ReferenceOneBitScale(&x[begin], elems);
    AppendFloat(scale, &result.bytes);
    const size_t signs = result.bytes.size();
    result.bytes.resize(signs + (elems + 7) / 8);
    for (size_t i = 0; i < elems; ++i) {
      const bool negative = x[begin + i] < 0 && !std::isnan(scale);
      if (negative) result.bytes[signs + i / 8] |= std::byte{1} << (i % 8);
      result.decoded.push_back(negative ? -scale : scale);
    }
  }
  return result;
}

struct ReferenceEntry {
  uint64_t index;
  float value;
};

// A topk payload of these entries, whose indices rise.
inline Bytes ReferenceTopK(const std::vector<ReferenceEntry>& entries) {
  Bytes bytes(4);
  const auto count = static_cast<uint32_t>(entries.size());
  std::memcpy(bytes.data(), &count, 4);
  uint64_t next = 0;
  for (const ReferenceEntry& entry : entries) {
    uint64_t gap = entry.index - next;
    for (; gap > 127; gap /= 128) bytes.push_back(static_cast<std::byte>(128 + gap % 128));
    bytes.push_back(static_cast<std::byte>(gap));
    AppendFloat(entry.value, &bytes);
    next = entry.index + 1;
  }
  return bytes;
}

// Σ w·v in order with fused additions, divided: the definition in reduce.h.
inline Floats ReferenceMean(const std::vector<Floats>& values,
                            const std::vector<uint32_t>& workers) {
  Floats mean(values[0].size());
  float divisor = 0;
  for (uint32_t count : workers) divisor += static_cast<float>(count);
  for (size_t i = 0; i < mean.size(); ++i) {
    float sum = static_cast<float>(workers[0]) * values[0][i];
    for (size_t k = 1; k < values.size(); ++k) {
      sum = std::fma(static_cast<float>(workers[k]), values[k][i], sum);
    }
    mean[i] = std::isnan(sum) ? kNaN : sum / divisor;
  }
  return mean;
}

}  // namespace thalweg
