#include "kernels/codec/lossy_reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace thalweg {
namespace {

void AppendFloat(float value, Bytes* bytes) {
  bytes->resize(bytes->size() + 4);
  std::memcpy(&(*bytes)[bytes->size() - 4], &value, 4);
}

// Returns Σ shrink·|x|: sixteen sums, then their sum by halves.
float ReferenceSum(const Floats& x, float shrink) {
  float sums[16] = {};
  for (size_t i = 0; i < x.size(); ++i) {
    sums[i % 16] = std::fma(std::fabs(x[i]), shrink, sums[i % 16]);
  }
  for (int half : {8, 4, 2, 1}) {
    for (int j = 0; j < half; ++j) sums[j] = sums[j] + sums[j + half];
  }
  return sums[0];
}

// Returns whether splitmix64's numbers flip the sign of an element of a whole block of onebit.
bool ReferenceFlip(size_t i) {
  uint64_t z = (i / 64 + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z = z ^ (z >> 31);
  return (z >> i % 64 & 1) != 0;
}

// Shrinks, flips and transforms x.
Floats ReferenceRotate(Floats x) {
  for (size_t i = 0; i < 1024; ++i) x[i] = (ReferenceFlip(i) ? -x[i] : x[i]) / 65536;
  for (size_t stride = 512; stride > 0; stride /= 2) {
    for (size_t i = 0; i < 1024; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i];
      const float b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  return x;
}

}  // namespace

float ReferenceDecodeInt8(int code, float scale) {
  if (!std::isfinite(scale) || code == -128 || code == 127 || code == -127) return kNaN;
  if (code == 126 || code == -126) return code > 0 ? kInfinity : -kInfinity;
  return static_cast<float>(code) * scale;
}

// The product of two floats is exact in double.
ReferenceChunk ReferenceInt8(const Floats& x) {
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

Floats ReferenceRotateBack(float scale, const std::vector<bool>& negative) {
  std::array<int, 1024> signs;
  for (unsigned i = 0; i < 1024; ++i) signs[i] = negative[i] ? -1 : 1;
  Floats decoded(1024);
  for (unsigned j = 0; j < 1024; ++j) {
    int sum = 0;
    for (unsigned i = 0; i < 1024; ++i) {
      sum += std::popcount(i & j) % 2 == 1 ? -signs[i] : signs[i];
    }
    const auto signed_sum = static_cast<float>(sum);
    decoded[j] = (ReferenceFlip(j) ? -signed_sum : signed_sum) * scale;
  }
  return decoded;
}

namespace {

ReferenceChunk ReferenceOneBitBlock(const Floats& x) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const bool whole = x.size() == 1024;
  const Floats signs = whole ? ReferenceRotate(x) : x;
  const float sum = ReferenceSum(signs, whole ? 1 : 1.0f / 2048);
  const float mean = sum / (static_cast<float>(x.size()) / 2048);
  const float scale = whole ? std::fmin(sum / 16, kLargest / 1024) : std::fmin(mean, kLargest);
  const bool finite = std::isfinite(sum);
  ReferenceChunk result;
  AppendFloat(finite ? scale : kNaN, &result.bytes);
  result.bytes.resize(4 + (x.size() + 7) / 8);
  std::vector<bool> negative(x.size());
  for (size_t i = 0; finite && i < x.size(); ++i) {
    negative[i] = signs[i] < 0;
    if (negative[i]) result.bytes[4 + i / 8] |= std::byte{1} << (i % 8);
  }
  if (!finite) {
    result.decoded.assign(x.size(), kNaN);
  } else if (whole) {
    result.decoded = ReferenceRotateBack(scale, negative);
  } else {
    for (bool minus : negative) result.decoded.push_back(minus ? -scale : scale);
  }
  return result;
}

}  // namespace

ReferenceChunk ReferenceOneBit(const Floats& x) {
  ReferenceChunk result;
  for (size_t begin = 0; begin < x.size(); begin += 1024) {
    const size_t end = std::min<size_t>(x.size(), begin + 1024);
    const ReferenceChunk block = ReferenceOneBitBlock({&x[begin], &x[begin] + (end - begin)});
    result.bytes.insert(result.bytes.end(), block.bytes.begin(), block.bytes.end());
    result.decoded.insert(result.decoded.end(), block.decoded.begin(), block.decoded.end());
  }
  return result;
}

Bytes ReferenceTopK(const std::vector<ReferenceEntry>& entries) {
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

Floats ReferenceMean(const std::vector<Floats>& values, const std::vector<uint32_t>& workers) {
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
